"""Creates directories and copies files: at local paths, and at URLs that fsspec supports."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

from torch_ckpt.checkpoint.publishing import published_file

StrPath = str | os.PathLike[str]


def mkdir(path: StrPath) -> None:
    """Creates a directory and its parents; keeps existing ones.

    Several ranks may call it at the same time. Object stores have no directories; their file
    systems create at most the bucket.

    Args:
        path: a local path, or a URL such as ``s3://bucket/run`` or ``file:///data/run``.

    Raises:
        OSError: the directory cannot be created; ``FileExistsError`` if a file has its name.
        ImportError: the URL needs a package that is not installed; the message names it.
        ValueError: fsspec does not support the URL's protocol.

    Example::

        training.mkdir("s3://bucket/run/profiles")
    """
    path = os.fspath(path)
    if not _is_url(path):
        os.makedirs(path, exist_ok=True)
        return
    file_system, remote_path = _resolve(path)
    file_system.makedirs(remote_path, exist_ok=True)
    # Not every file system of fsspec checks this.
    if file_system.isfile(remote_path):
        raise FileExistsError(errno.EEXIST, "a file has the name of the directory to create", path)


def check(path: StrPath) -> None:
    """Raises what :func:`mkdir` raises for a URL that is not supported; does nothing else."""
    path = os.fspath(path)
    if _is_url(path):
        _resolve(path)


def join(directory: StrPath, name: str) -> str:
    """Returns the path or URL of a name in a directory."""
    return f"{os.fspath(directory).rstrip('/')}/{name}"


def put(source: Path, target: StrPath) -> None:
    """Copies a local file, and creates the directory of the target if necessary.

    On local file systems the target never contains a partial file.

    Raises:
        OSError: the file cannot be copied. Remote file systems may raise other exceptions.
    """
    target = os.fspath(target)
    if not _is_url(target):
        _put_local(source, target)
        return
    file_system, path = _resolve(target)
    if "file" in _protocols(file_system):
        _put_local(source, path)
    else:
        file_system.makedirs(file_system._parent(path), exist_ok=True)
        file_system.put_file(str(source), path)


def _put_local(source: Path, target: str) -> None:
    os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
    with source.open("rb") as copied, published_file(target, sync=False) as stream:
        shutil.copyfileobj(copied, stream)


def _is_url(path: str) -> bool:
    return "://" in path


def _resolve(url: str) -> tuple[Any, str]:
    """Returns the file system of a URL, and the path on it."""
    # Imported late, since it imports fsspec.
    from torch_ckpt.steps.remote_files import resolve

    return resolve(url)


def _protocols(file_system: Any) -> tuple[str, ...]:
    protocol = file_system.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)
