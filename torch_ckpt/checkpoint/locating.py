"""Finds the checkpoint that a path or URL refers to, in Python and on the command line.

A path is one of these:

- the checkpoint directory itself, or a directory of safetensors files;
- a safetensors file, or the index of several files;
- ``ROOT/40``: step 40 of the run in ROOT, stored as ``0000000040``;
- ``ROOT``: the newest complete step of the run, which is the newest step of the highest epoch
  (lineage.py).

URLs are searched in the same way, with the calls that directories and stores have in common
(folders.py). Requests for objects by name come first, because a listing has all objects beneath the
URL.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from functools import partial
from typing import Any, NamedTuple

from torch_ckpt._base.formatting import some_of
from torch_ckpt._base.system import is_url
from torch_ckpt.checkpoint.folders import Folder, LocalFolder, RemoteFolder, open_file
from torch_ckpt.checkpoint.index import METADATA_NAME, no_checkpoint
from torch_ckpt.checkpoint.lineage import newest_of
from torch_ckpt.checkpoint.marker import MARKER_NAME, STEP_NAME, epoch_of, step_name
from torch_ckpt.errors import CheckpointError

_NUMBER = re.compile(r"\d{1,10}", re.ASCII)

#: Suffixes of torch.save files.
TORCH_SUFFIXES = (".pt", ".pth", ".bin")

_SAFETENSORS = ".safetensors"

# Suffix of the index of several safetensors files.
_INDEX = ".safetensors.index.json"

_CONVERT = "convert it to a checkpoint with torch-ckpt convert (torch_ckpt.convert)"


# Opens the folder at a path or URL.
_Opener = Callable[[str], Folder]


class OpenCheckpoint(NamedTuple):
    """A checkpoint whose folder is open.

    Attributes:
        folder: the open directory, or the objects beneath the URL.
        path: the path or URL of the checkpoint, or of the safetensors file or index.
        safetensors: the name in the folder of the safetensors file, or of the index of several
            files; None if a metadata file describes the checkpoint.
    """

    folder: Folder
    path: str
    safetensors: str | None = None


class _CompleteStep(NamedTuple):
    step: int
    epoch: int | None
    run: str = ""


def open_checkpoint(
    path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> OpenCheckpoint:
    """Opens the folder of the checkpoint that a path or URL refers to.

    If a local path is a root or a step number, the step gets a shared lock: it cannot be deleted
    until the directory is closed.

    Args:
        storage_options: see :class:`torch_ckpt.ReadOptions`; for URLs.

    Raises:
        FileNotFoundError: the directory or step does not exist, so there is no committed
            checkpoint.
        CheckpointError: the path refers to something else, which the message describes, or to
            several safetensors files without an index.
        ImportError, ValueError: the URL or an option is not allowed, or a package is missing.
        OSError: the directory cannot be opened or listed, or a request has failed.
    """
    path = os.fspath(path)
    opener: _Opener = LocalFolder
    if is_url(path):
        opener = partial(RemoteFolder, storage_options=storage_options)
    step: Folder | None = None
    names: list[str] = []
    try:
        folder = opener(path)
        if folder.contains(METADATA_NAME):
            return OpenCheckpoint(folder, folder.path)
        if is_url(path):
            # Only a listing shows whether there are objects beneath the URL.
            if path.endswith((_SAFETENSORS, _INDEX)):
                return _open_file(path, storage_options, opener)
            step = _open_by_number(path, opener)
        if step is None:
            names = folder.names()
    except NotADirectoryError:
        if not is_url(path) and not os.path.exists(path):
            raise
        return _open_file(path, storage_options, opener)
    except FileNotFoundError:
        step = None if is_url(path) else _open_by_number(path, opener)
        if step is None:
            raise _no_such_step(path, opener) from None
    folder = step or _newest_if_root(path, folder, names, opener)
    try:
        return OpenCheckpoint(folder, folder.path, _safetensors_in(folder))
    except BaseException:
        folder.close()
        raise


def _open_file(
    path: str, storage_options: Mapping[str, Any] | None, opener: _Opener
) -> OpenCheckpoint:
    format = _readable_format_of(path, storage_options)
    if format != "safetensors":
        raise CheckpointError(f"{path} is not a directory{_about_file(path, format, opener)}")
    if is_url(path):
        directory, name = os.path.split(path)
        return OpenCheckpoint(opener(directory), path, name)
    _refresh(path)
    # Follow links, because the caller chose the path.
    real_path = os.path.realpath(path)
    _refresh(real_path)
    directory, name = os.path.split(real_path)
    return OpenCheckpoint(opener(directory), path, name)


def _refresh(path: str) -> None:
    """Makes the client of a network file system look up a file again."""
    directory, name = os.path.split(path)
    with closing(LocalFolder(directory or ".")) as folder:
        folder.refresh(name)


def _newest_if_root(path: str, folder: Folder, names: list[str], opener: _Opener) -> Folder:
    """Returns the newest step if the folder is a root, and otherwise the folder itself.

    Args:
        names: the names in the folder.
    """
    try:
        # Ranks that save without collectives write one metadata file each.
        if any(name.endswith(METADATA_NAME) for name in names):
            return folder
        steps = sorted(filter(STEP_NAME.match, names))
        if steps:
            roots = itertools.chain([folder], map(opener, itertools.repeat(path)))
            step = _open_step(path, lambda: _newest_step(next(roots)), opener)
            if step is not None:
                folder.close()
                return step
            if not any(name.endswith((_SAFETENSORS, *TORCH_SUFFIXES)) for name in names):
                raise _no_complete_step(path, steps)
        return folder
    except BaseException:
        folder.close()
        raise


def _safetensors_in(folder: Folder) -> str | None:
    """Returns the name of the only safetensors file, or of the index of several files. Returns None
    if the folder has metadata, or contains neither metadata nor another format. The caller then
    reports that the metadata is missing."""
    if folder.contains(METADATA_NAME):
        return None
    names = folder.names()
    if any(name.endswith(METADATA_NAME) for name in names):
        return None
    files = [name for name in names if name.endswith(_SAFETENSORS)]
    indexes = [name for name in names if name.endswith(_INDEX)]
    if len(indexes) == 1 or (not indexes and len(files) == 1):
        return (indexes or files)[0]
    if files or indexes:
        raise CheckpointError(
            f"{folder.path} contains {len(files)} safetensors files and {len(indexes)} indexes. "
            "Pass the path of one file or index"
        )
    if any(name.endswith(TORCH_SUFFIXES) for name in names):
        raise CheckpointError(
            f"{folder.path} is not a checkpoint: it contains torch.save files; convert one of "
            "them to a checkpoint with torch-ckpt convert (torch_ckpt.convert)"
        )
    return None


def is_step_number(path: str) -> bool:
    """Returns True if the path ends in a number, as ``ROOT/40`` does."""
    return _NUMBER.fullmatch(os.path.basename(path.rstrip("/"))) is not None


def format_of(path: str, storage_options: Mapping[str, Any] | None = None) -> str | None:
    """Returns the format of a file, judged by its first bytes or its suffix: "torch", "safetensors"
    or None.

    Raises:
        OSError: the file cannot be read.
    """
    with open_file(path, storage_options) as stream:
        begin = stream.read(9) or b""
    if begin.startswith(b"PK\3\4"):
        return "torch"
    is_safetensors = begin[8:] == b"{" or path.endswith((_SAFETENSORS, _INDEX))
    return "safetensors" if is_safetensors else None


def _readable_format_of(path: str, storage_options: Mapping[str, Any] | None) -> str | None:
    try:
        return format_of(path, storage_options)
    except FileNotFoundError:
        raise
    except OSError:
        return None


def _open_by_number(path: str, opener: _Opener) -> Folder | None:
    """Opens the step that a path such as ``ROOT/40`` refers to. Returns None if there is none."""
    if not is_step_number(path):
        return None
    root, number = os.path.split(path.rstrip("/"))
    name = step_name(int(number))
    return _open_step(root, lambda: name, opener)


def _no_such_step(path: str, opener: _Opener) -> FileNotFoundError:
    """Builds the error for a path to which nothing belongs."""
    if is_step_number(path):
        newest = None
        with suppress(FileNotFoundError, NotADirectoryError):
            newest = _newest_step(opener(os.path.dirname(path.rstrip("/")) or "."))
        if newest is not None:
            return FileNotFoundError(
                errno.ENOENT, f"no such step; the newest step is {int(newest)}", path
            )
    if not is_url(path):
        return no_checkpoint(path, "such directory")
    is_file = path.endswith((_SAFETENSORS, _INDEX))
    return no_checkpoint(path, "such object" if is_file else f"{METADATA_NAME} beneath this URL")


def _open_step(root: str, choose: Callable[[], str | None], opener: _Opener) -> Folder | None:
    """Opens a step and takes the shared lock on it. Returns None if there is no such step.

    Args:
        choose: returns the name of the step's directory, or None. Called again if the step was
            deleted before it was locked.
    """
    while (name := choose()) is not None:
        try:
            folder = opener(os.path.join(root, name))
            is_step = folder.is_step()
        except FileNotFoundError:
            is_step = False
        if not is_step:
            if choose() == name:
                return None
            continue
        try:
            folder.share()
            # Otherwise a deletion has renamed the directory, or a save has replaced it.
            if folder.is_at_path():
                return folder
        except BaseException:
            folder.close()
            raise
        folder.close()
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


def _newest_step(root: Folder) -> str | None:
    """Returns the directory name of the newest complete step, or None."""
    newest = newest_of(
        _CompleteStep(int(name), epoch_of(marker))
        for name, marker in root.markers().items()
        if marker is not None
    )
    return None if newest is None else step_name(newest.step)


def _about_file(path: str, format: str | None, opener: _Opener) -> str:
    if format == "torch":
        return f" but a torch.save file; {_CONVERT}"
    folder = os.path.dirname(path) or "."
    with suppress(OSError):
        if opener(folder).contains(METADATA_NAME):
            return f" but a file of the checkpoint {folder}; pass that directory"
    return "; pass a checkpoint directory"
