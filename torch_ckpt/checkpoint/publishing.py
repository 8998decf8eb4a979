"""Files that appear under their names when they are whole.

1. A file is written under a temporary name beside its own, and fsynced.
2. The directory is opened before, and the file gets its name by csrc/directory/publish.h: nothing
   appears in a directory that has taken the path's place meanwhile. The directory is fsynced.
3. After a failure, or Ctrl-C, what was written is removed. Where only the last fsync of the
   directory has failed, or the rename in a way that does not tell whether it was carried out, all
   stays.
4. What a killed process leaves has a name that begins with a dot and holds ``.tmp-``.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import BinaryIO

from torch_ckpt import _core
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.errors import DurabilityUncertain


def split(target: str) -> tuple[str, str]:
    """The directory of a target, absolute, and its name there."""
    return os.path.split(os.path.abspath(target))


def temporary_name(name: str) -> str:
    """One that nobody else has."""
    return f".{name}.tmp-{uuid.uuid4().hex[:16]}"


@contextmanager
def new_file(path: str, *, sync: bool = True) -> Iterator[BinaryIO]:
    """A file that is fsynced at the end of the block."""
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
    """A new file that takes its name at the end of the block; none if the block fails.

    Args:
        target: its path.
        overwrite: whether it replaces a file of the name.
        sync: False: nothing is fsynced.
        advice: see :func:`told_of_durability`.

    Raises:
        FileExistsError: the name is taken, and ``overwrite`` is False.
        OSError: a system call failed.
        CheckpointError: the path leads to another directory than when this began.
        DurabilityUncertain: it is complete, and may not be there after a power cut.
    """
    directory, name = split(target)
    require_absent(target, overwrite)
    with closing(OpenDirectory(directory)) as opened:
        temporary = temporary_name(name)
        try:
            with new_file(os.path.join(directory, temporary), sync=sync) as stream:
                yield stream
            with told_of_durability(target, advice):
                _core.publish(opened, temporary, name, sync=sync, replace=overwrite)
        except DurabilityUncertain:
            # The rename may yet be carried out.
            raise
        except BaseException:
            with suppress(OSError):
                opened.remove(temporary)
            raise


def require_absent(target: str, overwrite: bool) -> None:
    """Raises FileExistsError where something is there that must not be replaced."""
    if not overwrite and os.path.lexists(target):
        raise FileExistsError(
            errno.EEXIST, "already exists; pass overwrite=True (--overwrite) to replace it", target
        )


@contextmanager
def told_of_durability(target: str, advice: str) -> Iterator[None]:
    """A block in which DurabilityUncertain is of a target; ``advice``: what to do about it."""
    try:
        yield
    except DurabilityUncertain as error:
        raise DurabilityUncertain(
            f"{target} is complete, but a power cut may still lose it ({error.args[0]}){advice}",
            error.errno,
        ) from error
