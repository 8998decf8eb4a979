"""Creates directories and copies files, at local paths and at URLs."""

from __future__ import annotations

import errno
import os
import shutil
from functools import partial
from pathlib import Path

from torch_ckpt._base.system import local_path
from torch_ckpt.checkpoint.publishing import published_file
from torch_ckpt.stores import open_object

StrPath = str | os.PathLike[str]

_PIECE_BYTES = 16 << 20


def mkdir(path: StrPath) -> None:
    """Creates a directory and its parents. Existing directories are kept.

    Several ranks can call this function at the same time. Beneath a URL, it creates nothing,
    because a directory appears with its first file. The bucket must exist.

    Args:
        path: a local path, or a URL such as ``s3://bucket/run`` or ``file:///data/run``.

    Raises:
        OSError: the directory cannot be created; ``FileExistsError`` if the path is a file.
        ImportError: the URL needs a package that is not installed; the message names the package.
        ValueError: the URL is not allowed, or its protocol is not supported.

    Example::

        training.mkdir("s3://bucket/run/profiles")
    """
    directory = local_path(path)
    if directory is not None:
        os.makedirs(directory, exist_ok=True)
        return
    store, name = open_object(os.fspath(path))
    if name and store.find(name) is not None:
        raise FileExistsError(
            errno.EEXIST, "a file with this name already exists", store.url_of(name)
        )


def put(source: Path, target: StrPath) -> None:
    """Copies a local file, creating the target's directory if necessary.

    On local file systems, the target is never a partial file.

    Raises:
        OSError: the file cannot be copied.
    """
    path = local_path(target)
    with source.open("rb") as copied:
        if path is None:
            store, name = open_object(os.fspath(target))
            pieces = (memoryview(piece) for piece in iter(partial(copied.read, _PIECE_BYTES), b""))
            store.put(name, pieces, os.fstat(copied.fileno()).st_size)
            return
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with published_file(path, sync=False) as stream:
            shutil.copyfileobj(copied, stream)
