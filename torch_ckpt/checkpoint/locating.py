"""Finds the checkpoint that a path refers to, in Python and on the command line.

A path is one of these:

- the checkpoint directory itself, or a directory of safetensors files;
- a safetensors file, or the index of several files;
- ``ROOT/40``: step 40 of the run in ROOT, stored as ``0000000040``;
- ``ROOT``: the newest complete step of the run, which is the newest step of the highest epoch
  (lineage.py).
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from torch_ckpt._base.formatting import some_of
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.index import METADATA_NAME, no_checkpoint
from torch_ckpt.checkpoint.lineage import newest_of
from torch_ckpt.checkpoint.marker import epoch_of, read_marker
from torch_ckpt.checkpoint.step_names import MARKER_NAME, STEP_NAME, step_name
from torch_ckpt.errors import CheckpointError

_NUMBER = re.compile(r"\d{1,10}", re.ASCII)

#: Suffixes of torch.save files.
TORCH_SUFFIXES = (".pt", ".pth", ".bin")

_SAFETENSORS = ".safetensors"

# Suffix of the index of several safetensors files.
_INDEX = ".safetensors.index.json"

_CONVERT = "convert it to a checkpoint with torch-ckpt convert (torch_ckpt.convert)"


class OpenCheckpoint(NamedTuple):
    """A checkpoint whose directory is open.

    Attributes:
        directory: the open directory.
        path: the path of the checkpoint directory, or of the safetensors file or index.
        safetensors: the name in the directory of the safetensors file, or of the index of several
            files; None if a metadata file describes the checkpoint.
    """

    directory: OpenDirectory
    path: str
    safetensors: str | None = None


class _CompleteStep(NamedTuple):
    step: int
    epoch: int | None
    run: str = ""


def open_checkpoint(path: str | os.PathLike[str]) -> OpenCheckpoint:
    """Opens the directory of the checkpoint that a path refers to.

    If the path is a root or a step number, the step gets a shared lock: it cannot be deleted until
    the directory is closed.

    Raises:
        FileNotFoundError: the directory or step does not exist, so there is no committed
            checkpoint.
        CheckpointError: the path refers to something else, which the message describes, or to
            several safetensors files without an index.
        OSError: the directory cannot be opened or listed.
    """
    path = os.fspath(path)
    try:
        directory = OpenDirectory(path)
    except NotADirectoryError:
        if not os.path.exists(path):
            raise
        return _open_file(path)
    except FileNotFoundError:
        directory = _open_by_number(path)
    else:
        if is_present(METADATA_NAME, directory):
            return OpenCheckpoint(directory, directory.path)
        directory = _newest_if_root(path, directory)
    try:
        return OpenCheckpoint(directory, directory.path, _safetensors_in(directory))
    except BaseException:
        directory.close()
        raise


def _open_file(path: str) -> OpenCheckpoint:
    try:
        is_safetensors = format_of(path) == "safetensors"
    except OSError:
        is_safetensors = False
    if not is_safetensors:
        raise CheckpointError(f"{path} is not a directory{_about_file(path)}")
    # Follow links, because the caller chose the path.
    folder, name = os.path.split(os.path.realpath(path))
    return OpenCheckpoint(OpenDirectory(folder), path, name)


def _newest_if_root(path: str, directory: OpenDirectory) -> OpenDirectory:
    """Returns the newest step if the directory is a root, and otherwise the directory itself."""
    try:
        names = directory.names()
        # Ranks that save without collectives write one metadata file each.
        if any(name.endswith(METADATA_NAME) for name in names):
            return directory
        steps = sorted(filter(STEP_NAME.match, names))
        if steps:
            step = _open_step(path, lambda: _newest_step(path))
            if step is not None:
                directory.close()
                return step
            if not any(name.endswith((_SAFETENSORS, *TORCH_SUFFIXES)) for name in names):
                raise _no_complete_step(path, steps)
        return directory
    except BaseException:
        directory.close()
        raise


def _safetensors_in(directory: OpenDirectory) -> str | None:
    """Returns the name of the only safetensors file, or of the index of several files. Returns None
    if the directory has metadata, or contains neither metadata nor another format. The caller then
    reports that the metadata is missing."""
    if is_present(METADATA_NAME, directory):
        return None
    names = directory.names()
    if any(name.endswith(METADATA_NAME) for name in names):
        return None
    files = [name for name in names if name.endswith(_SAFETENSORS)]
    indexes = [name for name in names if name.endswith(_INDEX)]
    if len(indexes) == 1 or (not indexes and len(files) == 1):
        return (indexes or files)[0]
    if files or indexes:
        raise CheckpointError(
            f"{directory.path} contains {len(files)} safetensors files and {len(indexes)} indexes. "
            "Pass the path of one file or index"
        )
    if any(name.endswith(TORCH_SUFFIXES) for name in names):
        raise CheckpointError(
            f"{directory.path} is not a checkpoint: it contains torch.save files; convert one of "
            "them to a checkpoint with torch-ckpt convert (torch_ckpt.convert)"
        )
    return None


def is_step_number(path: str) -> bool:
    """Returns True if the path ends in a number, as ``ROOT/40`` does."""
    return _NUMBER.fullmatch(os.path.basename(path.rstrip("/"))) is not None


def format_of(path: str) -> str | None:
    """Returns the format of a file, judged by its first bytes or its suffix: "torch", "safetensors"
    or None.

    Raises:
        OSError: the file cannot be read.
    """
    # Without O_NONBLOCK, opening a FIFO would block until it has a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as stream:
        begin = stream.read(9) or b""
    if begin.startswith(b"PK\3\4"):
        return "torch"
    is_safetensors = begin[8:] == b"{" or path.endswith((_SAFETENSORS, _INDEX))
    return "safetensors" if is_safetensors else None


def _open_by_number(path: str) -> OpenDirectory:
    if is_step_number(path):
        root, number = os.path.split(path.rstrip("/"))
        name = step_name(int(number))
        step = _open_step(root, lambda: name)
        if step is not None:
            return step
        newest = _newest_step(root)
        if newest is not None:
            raise FileNotFoundError(
                errno.ENOENT, f"no such step; the newest step is {int(newest)}", path
            )
    raise no_checkpoint(path, "such directory")


def _open_step(root: str, choose: Callable[[], str | None]) -> OpenDirectory | None:
    """Opens a step and takes the shared lock on it. Returns None if there is no such step.

    Args:
        choose: returns the name of the step's directory, or None. Called again if the step was
            deleted before it was locked.
    """
    while (name := choose()) is not None:
        path = os.path.join(root, name)
        try:
            directory = OpenDirectory(path)
        except FileNotFoundError:
            if choose() == name:
                return None
            continue
        try:
            directory.share()
            # Otherwise a deletion has renamed the directory, or a save has replaced it.
            if directory.is_at_path():
                return directory
        except BaseException:
            directory.close()
            raise
        directory.close()
    return None


def _no_complete_step(root: str, steps: list[str]) -> FileNotFoundError:
    """Builds the error for a root whose steps all lack the marker."""
    return FileNotFoundError(
        errno.ENOENT,
        f"no step is complete: {some_of(steps)} {'lacks' if len(steps) == 1 else 'lack'} "
        f"{MARKER_NAME}. The save is still running or was interrupted, or the step was copied "
        f"without this file. To read an incomplete step, pass its directory, such as "
        f"{os.path.join(root, steps[-1])}",
        root,
    )


def _newest_step(root: str) -> str | None:
    """Returns the directory name of the newest complete step, or None."""
    try:
        names = os.listdir(root or ".")
    except (FileNotFoundError, NotADirectoryError):
        return None
    steps = filter(STEP_NAME.match, names)
    markers = ((name, read_marker(os.path.join(root, name))) for name in steps)
    newest = newest_of(
        _CompleteStep(int(name), epoch_of(marker)) for name, marker in markers if marker is not None
    )
    return None if newest is None else step_name(newest.step)


def is_present(name: str, directory: OpenDirectory) -> bool:
    """Returns True if the directory has a file of this name."""
    try:
        os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
    except OSError:
        # After any other error, too, the caller lists the directory: the list has the name, or
        # listing raises the error.
        return False
    return True


def _about_file(path: str) -> str:
    with suppress(OSError):
        if format_of(path) == "torch":
            return f" but a torch.save file; {_CONVERT}"
    directory = os.path.dirname(path) or "."
    if os.path.exists(os.path.join(directory, METADATA_NAME)):
        return f" but a file of the checkpoint {directory}; pass that directory"
    return "; pass a checkpoint directory"
