"""Publishes files under their final names once they are complete.

1. The directory is opened. The file is written to it under a temporary name, and fsynced.
2. csrc/directory/publish.h renames the file relative to the open directory, so that the file cannot
   appear in another directory that has replaced the first one. Then the directory is fsynced.
3. After a failure or Ctrl-C, the file is removed. It stays if only the last fsync of the directory
   has failed, or if it is unknown whether the rename took effect.
4. A killed process leaves behind a file whose name begins with a dot and contains ``.tmp-``.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from typing import BinaryIO

from torch_ckpt import _core
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.errors import DurabilityUncertain


def split(target: str) -> tuple[str, str]:
    """Returns the absolute path of a target's directory, and the target's name."""
    return os.path.split(os.path.abspath(target))


def temporary_name(name: str) -> str:
    """Returns a unique temporary name."""
    return f".{name}.tmp-{uuid.uuid4().hex[:16]}"


def write_new_file(
    directory: OpenDirectory,
    name: str,
    pieces: Iterable[memoryview],
    bytes: int,
    *,
    direct_io: bool | str = "auto",
    sync: bool = True,
    busy: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Creates a file in a directory. After an error, the caller removes the file.

    Args:
        pieces: the contents. Direct I/O is used for pieces in memory from
            :func:`torch_ckpt._base.system.memory_for_io`.
        bytes: size of the contents.
        direct_io: see :class:`torch_ckpt.WriteOptions`.
        sync: fsync the file.
        busy: block in which the function waits for the disk.

    Raises:
        FileExistsError: the file exists.
        OSError: the file cannot be written.
        ValueError: ``direct_io`` is True and the file system does not support it.
    """
    file = _core.NewFile(directory, name, bytes, direct_io)
    try:
        for piece in pieces:
            try:
                file.write(piece)
            finally:
                # The next piece may need the memory of this one.
                del piece
        with busy():
            file.finish(sync)
    finally:
        # Closes the file, also while a caller keeps the error and with it this frame.
        del file


@contextmanager
def _new_file(path: str, sync: bool) -> Iterator[BinaryIO]:
    """Creates a file, and fsyncs it at the end of the block."""
    try:
        with open(path, "xb") as stream:
            yield stream
            stream.flush()
            if sync:
                _core.fault_point("fsync", path)
                os.fsync(stream.fileno())
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, path) from error


@contextmanager
def published_file(
    target: str, *, overwrite: bool = True, sync: bool = True, advice: str = ""
) -> Iterator[BinaryIO]:
    """Creates a file that appears under its name at the end of the block. If the block fails, no
    file remains.

    Args:
        target: path of the file.
        overwrite: replace an existing file.
        sync: fsync the file and its directory.
        advice: see :func:`add_durability_advice`.

    Raises:
        FileExistsError: the file exists, and ``overwrite`` is False.
        OSError: a system call failed.
        CheckpointError: the path now refers to a different directory.
        DurabilityUncertain: the file is complete, but may be lost in a power cut.
    """
    directory, name = split(target)
    require_absent(target, overwrite)
    with closing(OpenDirectory(directory)) as opened:
        temporary = temporary_name(name)
        try:
            with _new_file(os.path.join(directory, temporary), sync) as stream:
                yield stream
            with add_durability_advice(target, advice):
                _core.publish(opened, temporary, name, sync=sync, replace=overwrite)
        except DurabilityUncertain:
            # Keep the temporary file: the rename may still take effect.
            raise
        except BaseException:
            with suppress(OSError):
                opened.remove(temporary)
            raise


def require_absent(target: str, overwrite: bool) -> None:
    """Raises FileExistsError if the target exists and must not be replaced."""
    if not overwrite and os.path.lexists(target):
        raise exists_error(target)


def exists_error(target: str) -> FileExistsError:
    """Builds the error for a target that exists and must not be replaced."""
    return FileExistsError(
        errno.EEXIST, "already exists; pass overwrite=True (--overwrite) to replace it", target
    )


@contextmanager
def add_durability_advice(target: str, advice: str) -> Iterator[None]:
    """Adds the target, and ``advice`` on what to do, to a DurabilityUncertain error of a block."""
    try:
        yield
    except DurabilityUncertain as error:
        raise DurabilityUncertain(
            f"{target} is complete, but may be lost in a power cut ({error.args[0]}){advice}",
            error.errno,
        ) from error
