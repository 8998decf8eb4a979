"""Directories and files that may be remote: local paths, and URLs that fsspec knows."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

from torch_ckpt.checkpoint.publishing import published_file

StrPath = str | os.PathLike[str]


def mkdir(path: StrPath) -> None:
    """Makes a directory and those above it, where they are not there yet.

    Object stores have no directories: there this makes sure that the bucket exists, if at all.
    Any number of ranks may call it at once.

    Args:
        path: a local path, or a URL such as ``s3://bucket/run`` or ``file:///data/run``.

    Raises:
        OSError: what the file system says; ``FileExistsError`` where a file has that name.
        ImportError: the URL's file system is in a package that is not installed; says which.
        ValueError: fsspec does not know the URL's protocol.
    """
    path = os.fspath(path)
    if not _is_url(path):
        os.makedirs(path, exist_ok=True)
        return
    file_system, place = _resolve(path)
    file_system.makedirs(place, exist_ok=True)
    # Not every file system of fsspec's looks whether that name is taken by a file.
    if file_system.isfile(place):
        raise FileExistsError(errno.EEXIST, "a file has the name of the directory to make", path)


def check(path: StrPath) -> None:
    """Fails as :func:`mkdir` does where a path cannot be one, and does nothing else."""
    path = os.fspath(path)
    if _is_url(path):
        _resolve(path)


def join(directory: StrPath, name: str) -> str:
    """The path, or the URL, of a name in a directory."""
    return f"{os.fspath(directory).rstrip('/')}/{name}"


def put(source: Path, target: StrPath) -> None:
    """Copies a local file, and makes the directory of its target where it is not there.

    On local file systems the target never holds a part of it.

    Raises:
        OSError: what the file system says; remote ones also raise other things.
    """
    target = os.fspath(target)
    if not _is_url(target):
        _put_local(source, target)
        return
    file_system, place = _resolve(target)
    if "file" in _protocols(file_system):
        _put_local(source, place)
    else:
        file_system.makedirs(file_system._parent(place), exist_ok=True)
        file_system.put_file(str(source), place)


def _put_local(source: Path, target: str) -> None:
    os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
    with source.open("rb") as copied, published_file(target, sync=False) as stream:
        shutil.copyfileobj(copied, stream)


def _is_url(path: str) -> bool:
    return "://" in path


def _resolve(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path on it."""
    # Not before it is needed, as fsspec itself.
    from torch_ckpt.steps.remote_files import resolve

    return resolve(url)


def _protocols(file_system: Any) -> tuple[str, ...]:
    protocol = file_system.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)
