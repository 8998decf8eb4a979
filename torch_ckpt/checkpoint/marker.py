"""The names of steps and of their files, and the marker that completes a step."""

from __future__ import annotations

import errno
import json
import operator
import os
import re
from collections.abc import Container
from typing import Any

from torch_ckpt import _core
from torch_ckpt._base.formatting import size
from torch_ckpt.stores import Entry, ObjectStore, at_once

LARGEST_STEP = 10**10 - 1

#: Name of a step directory.
STEP_NAME = re.compile(r"^(\d{10})$", re.ASCII)

#: A step is complete if its directory contains this file.
MARKER_NAME = _core.MARKER_NAME

#: Retention keeps a step if its directory contains this file.
PINNED_NAME = _core.PINNED_NAME

#: A step beneath a URL is being deleted if it has an object of this name.
DELETED_NAME = "deleted"

#: Object beneath the URL of a root that contains the name of the step that was saved last.
LAST_SAVED_NAME = ".last_saved"

#: Size limit of a marker, in bytes. A longer file was not written by torch_ckpt.
MOST_MARKER_BYTES = 16 << 20

# A longer object contains no name of a step.
_MOST_NAME_BYTES = 64


def step_name(step: int) -> str:
    """Returns the name of a step's directory: the step number, padded to ten digits.

    Raises:
        TypeError: ``step`` is not an integer.
        ValueError: ``step`` is negative or has more than ten digits.
    """
    try:
        number = operator.index(step)
    except TypeError:
        # The repr of a state dict would fill pages.
        got = repr(step) if isinstance(step, (str, float, type(None))) else type(step).__name__
        raise TypeError(f"step must be an int, got {got}") from None
    if not 0 <= number <= LARGEST_STEP:
        raise ValueError(f"step must be between 0 and {LARGEST_STEP}, got {number}")
    return f"{number:010d}"


def read_marker(directory: str) -> dict[str, Any] | None:
    """Reads the marker of a step.

    Returns:
        The content of the marker; None if the step has none. An empty dict if the marker cannot be
        read or parsed, for example because another program created it as an empty file. Any marker
        makes the step complete.
    """
    try:
        with open(os.path.join(directory, MARKER_NAME), "rb") as file:
            return parsed_marker(file.read(MOST_MARKER_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        # The marker exists. Loading the step will report whether its files can be read.
        return {}


def read_object_marker(store: ObjectStore, marker: Entry) -> dict[str, Any] | None:
    """Reads the marker of a step beneath a URL.

    Args:
        marker: the object, as it was found.

    Returns: see :func:`read_marker`.
    """
    if marker.bytes > MOST_MARKER_BYTES:
        return {}
    try:
        return parsed_marker(store.read(marker.name, MOST_MARKER_BYTES)[0])
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        return {}


def list_run(root: ObjectStore) -> dict[str, Entry]:
    """Lists the objects of a run by name, with the marker of the step that was saved last, which a
    listing that lags does not have."""
    listed = {entry.name: entry for entry in root.list()}
    return listed | _find_last_saved(root, listed)


def _find_last_saved(root: ObjectStore, listed: Container[str]) -> dict[str, Entry]:
    """Finds the step that was saved last by the names of its objects, because a listing may not
    have the newest objects yet.

    Args:
        root: the objects of a run.
        listed: the names in the listing.

    Returns:
        The marker objects of the step; empty if the marker is listed, or if there is none.
    """
    try:
        step = root.read(LAST_SAVED_NAME, _MOST_NAME_BYTES)[0].decode(errors="replace")
    except FileNotFoundError:
        return {}
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        return {}
    marker = f"{step}/{MARKER_NAME}"
    if not STEP_NAME.match(step) or marker in listed:
        return {}
    names = [marker, f"{step}/{DELETED_NAME}", f"{step}/{PINNED_NAME}"]
    found = {entry.name: entry for entry in at_once(root.find, names) if entry is not None}
    return found if marker in found else {}


def parsed_marker(data: bytes) -> dict[str, Any]:
    """Parses a marker. Returns an empty dict if the marker is not a JSON object."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def epoch_of(marker: dict[str, Any]) -> int | None:
    """Returns the epoch of the run that wrote a marker (lease_protocol.py): 0 if the run was one of
    version 0.1. None if the marker is empty, because a user created it or it cannot be read."""
    epoch = marker.get("epoch", 0)
    if not marker:
        return None
    return epoch if type(epoch) is int and epoch > 0 else 0


def newest_epoch(root: str) -> int:
    """Returns the greatest epoch of the markers beneath a local root, also of unfinished steps."""
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return 0
    paths = (os.path.join(root, name) for name in names if _core.parse_step_name(name))
    markers = (read_marker(path) for path in paths)
    return max((epoch_of(marker) or 0 for marker in markers if marker is not None), default=0)


def encoded_marker(document: dict[str, Any]) -> bytes:
    """Encodes the content of a marker.

    Raises:
        TypeError, ValueError: a value is not a JSON value, or the marker is too long.
    """
    data = json.dumps(document, indent=1, sort_keys=True).encode()
    if len(data) > MOST_MARKER_BYTES:
        raise ValueError(
            f"metrics and notes take {size(len(data))} as JSON, more than the limit of "
            f"{size(MOST_MARKER_BYTES)}. Save large values as part of the state."
        )
    return data
