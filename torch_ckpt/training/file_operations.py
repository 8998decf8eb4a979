"""Creates directories and copies files, at local paths and at URLs that fsspec supports."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

from torch_ckpt.checkpoint.publishing import published_file

StrPath = str | os.PathLike[str]


def mkdir(path: StrPath) -> None:
    """Creates a directory and its parents. Existing directories are kept.

    Several ranks can call this function at the same time. Object stores have no directories, so in
    an object store fsspec creates at most the bucket.

    Args:
        path: a local path, or a URL such as ``s3://bucket/run`` or ``file:///data/run``.

    Raises:
        OSError: the directory cannot be created; ``FileExistsError`` if the path is a file.
        ImportError: the URL needs a package that is not installed; the message names the package.
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
    # Not all fsspec file systems check this.
    if file_system.isfile(remote_path):
        raise FileExistsError(errno.EEXIST, "a file with this name already exists", path)


def check(path: StrPath) -> None:
    """Raises the same errors as :func:`mkdir` if the path is an unsupported URL."""
    path = os.fspath(path)
    if _is_url(path):
        _resolve(path)


def join(directory: StrPath, name: str) -> str:
    """Appends a name to the path or URL of a directory."""
    return f"{os.fspath(directory).rstrip('/')}/{name}"


def put(source: Path, target: StrPath) -> None:
    """Copies a local file, creating the target's directory if necessary.

    On local file systems, the target is never a partial file.

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
    """Returns a URL's file system, and the path on it."""
    # Imported late, because it imports fsspec.
    from torch_ckpt.steps.remote_files import resolve

    return resolve(url)


def _protocols(file_system: Any) -> tuple[str, ...]:
    protocol = file_system.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)
