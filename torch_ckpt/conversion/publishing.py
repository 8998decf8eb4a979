"""Files and directories that appear under their names when they are whole.

1. A file is written under a temporary name beside its own, fsynced, renamed, and the directory
   fsynced; several files in a directory of a temporary name that is renamed.
2. After a failure, or Ctrl-C, what was written is removed. Where only the last fsync of the
   directory has failed, the target stays.
3. What a killed process leaves has a name that begins with a dot and holds ``.tmp-``.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import BinaryIO

from torch_ckpt import _C
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.errors import DurabilityUncertain

_OUR_NAME = re.compile(
    r"^model(-\d{5,}-of-\d{5,})?\.safetensors$|^model\.safetensors\.index\.json$|^config\.json$"
)


def require_absent(target: str, overwrite: bool) -> None:
    """Raises FileExistsError where something is there that must not be replaced."""
    if not overwrite and os.path.lexists(target):
        raise FileExistsError(
            errno.EEXIST, "is there already; overwrite=True (--overwrite) replaces it", target
        )


def _temporary(target: str) -> str:
    directory, name = os.path.split(os.path.abspath(target))
    return os.path.join(directory, f".{name}.tmp-{uuid.uuid4().hex[:16]}")


def _sync_directory_of(path: str) -> None:
    """Makes durable that a target has its name.

    Raises:
        DurabilityUncertain: it is there, and may not last.
    """
    try:
        with closing(OpenDirectory(os.path.dirname(os.path.abspath(path)))) as directory:
            directory.sync()
    except OSError as error:
        raise DurabilityUncertain(
            f"{path} is there and complete, but the fsync of its directory failed ({error}): a "
            "power cut may undo it; convert again with overwrite=True (--overwrite)",
            error.errno or 0,
        ) from error


@contextmanager
def new_file(path: str) -> Iterator[BinaryIO]:
    """A file that is fsynced at the end of the block."""
    try:
        with open(path, "xb") as stream:
            yield stream
            stream.flush()
            _C.fault_point("fsync", path)
            os.fsync(stream.fileno())
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, path) from error


@contextmanager
def published_file(target: str, overwrite: bool) -> Iterator[BinaryIO]:
    """A new file that takes its name at the end of the block; none if the block fails."""
    require_absent(target, overwrite)
    temporary = _temporary(target)
    try:
        with new_file(temporary) as stream:
            yield stream
        require_absent(target, overwrite)
        os.rename(temporary, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    _sync_directory_of(target)


@contextmanager
def published_directory(target: str, overwrite: bool) -> Iterator[str]:
    """The same with a directory. One that is replaced may hold nothing but files of this kind."""
    _require_ours(target, overwrite)
    temporary, former = _temporary(target), _temporary(target)
    os.mkdir(temporary)
    try:
        yield temporary
        with closing(OpenDirectory(temporary)) as directory:
            directory.sync()
        _require_ours(target, overwrite)
        with suppress(FileNotFoundError):
            os.rename(target, former)
        os.rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        with suppress(FileNotFoundError):
            os.rename(former, target)
        raise
    _sync_directory_of(target)
    shutil.rmtree(former, ignore_errors=True)


def _require_ours(target: str, overwrite: bool) -> None:
    if not os.path.isdir(target):
        require_absent(target, overwrite=False)
        return
    others = [name for name in os.listdir(target) if not _OUR_NAME.match(name)]
    if others:
        raise FileExistsError(
            errno.EEXIST, f"is a directory with other files ({others[0]}); they stay", target
        )
    if os.listdir(target):
        require_absent(target, overwrite)
