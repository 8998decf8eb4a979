"""The file that makes a step complete, and the one that pins it."""

from __future__ import annotations

import json
import os
from typing import Any

from torch_ckpt import _core
from torch_ckpt._base.formatting import size
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.step_names import MARKER_NAME, PINNED_NAME

#: A longer file is not a marker of ours.
MOST_MARKER_BYTES = 16 << 20


def read_marker(directory: str) -> dict[str, Any] | None:
    """What a step's marker says; None where there is none.

    The marker's being there is what counts. One that cannot be understood, as an empty one of
    another program, says nothing.
    """
    try:
        with open(os.path.join(directory, MARKER_NAME), "rb") as file:
            return parsed_marker(file.read(MOST_MARKER_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        # It is there; whether the step can be read, loading it tells.
        return {}


def parsed_marker(data: bytes) -> dict[str, Any]:
    """The document in a marker; empty where there is none."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def encoded_marker(document: dict[str, Any]) -> bytes:
    """A marker's bytes.

    Raises:
        TypeError, ValueError: something in it is nothing that JSON knows, or it is too long.
    """
    data = json.dumps(document, indent=1, sort_keys=True).encode()
    if len(data) > MOST_MARKER_BYTES:
        raise ValueError(
            f"metrics and notes take {size(len(data))} as JSON; at most "
            f"{size(MOST_MARKER_BYTES)} are read again: save the rest as a part of the state"
        )
    return data


def write_marker(directory: OpenDirectory, document: dict[str, Any], sync: bool) -> None:
    """Writes the marker whole, since an empty one is that of a step that has no metrics.

    Durably if wanted.
    """
    # The commit of the metadata has made durable what lies above.
    _core.publish_contents(
        directory, MARKER_NAME, encoded_marker(document), sync=sync, sync_above=False
    )


def pin(directory: OpenDirectory) -> None:
    """Has retention leave a step alone, durably."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
    os.close(os.open(PINNED_NAME, flags, 0o666, dir_fd=directory.fd))
    directory.sync()
