"""Which checkpoint a path on the command line means.

All commands ask here, so that each of them takes ``ROOT/40`` for a step of a run, and says the same
of what is not there and of what is not a checkpoint.
"""

from __future__ import annotations

import errno
import os
import re

from torch_ckpt.checkpoint.metadata import METADATA_NAME
from torch_ckpt.conversion.sources import format_of
from torch_ckpt.errors import CheckpointError
from torch_ckpt.steps import LocalSteps, step_name

_NUMBER = re.compile(r"\d{1,10}", re.ASCII)


def checkpoint_at(path: str | os.PathLike[str], *, other_formats: bool = False) -> str:
    """The directory of the checkpoint that a path means.

    Args:
        path: a checkpoint's directory, or ``ROOT/40`` for the directory ``0000000040`` in ROOT.
        other_formats: return the paths of ``torch.save`` files and of safetensors as they are.

    Raises:
        FileNotFoundError: there is nothing at the path.
        CheckpointError: what is there is not a checkpoint; the message says what to name instead.
        OSError: the directory cannot be listed.
    """
    path = os.fspath(path)
    if not os.path.exists(path):
        return _step_at(path)
    if not os.path.isdir(path):
        if other_formats:
            return path
        raise CheckpointError(f"{path} is not a directory{_about_file(path)}")
    names = os.listdir(path)
    # Ranks that save without collectives have a metadata file each.
    if any(name.endswith(METADATA_NAME) for name in names):
        return path
    if any(name.endswith(".safetensors") for name in names):
        if other_formats:
            return path
        raise CheckpointError(
            f"{path} is not a checkpoint but a directory of safetensors files: torch-ckpt convert "
            "makes a checkpoint of it"
        )
    newest = _newest_step(path)
    if newest is not None:
        raise CheckpointError(
            f"{path} is not a checkpoint but the root of a run, whose newest step is {newest}: "
            f"name it as {os.path.join(path, str(newest))}"
        )
    raise CheckpointError(
        f"{path} is not a checkpoint: there is no {METADATA_NAME} in it, which a save writes last"
    )


def _step_at(path: str) -> str:
    root, name = os.path.split(path.rstrip("/"))
    if _NUMBER.fullmatch(name):
        step = os.path.join(root, step_name(int(name)))
        if os.path.isdir(step):
            return step
        newest = _newest_step(root or ".")
        if newest is not None:
            raise FileNotFoundError(
                errno.ENOENT, f"there is no such step; the newest one is {newest}", path
            )
    raise FileNotFoundError(errno.ENOENT, "it does not exist", path)


def _newest_step(root: str) -> int | None:
    entries = LocalSteps(root).entries(leftovers=False) if os.path.isdir(root) else []
    return entries[-1].step if entries else None


def _about_file(path: str) -> str:
    titles = {"torch": "a file of torch.save", "safetensors": "a safetensors file"}
    title = titles.get(format_of(path) or "")
    if title is not None:
        return f" but {title}: torch-ckpt convert makes a checkpoint of it"
    directory = os.path.dirname(path) or "."
    if os.path.exists(os.path.join(directory, METADATA_NAME)):
        return f" but a file of the checkpoint {directory}"
    return ", and a checkpoint is one"
