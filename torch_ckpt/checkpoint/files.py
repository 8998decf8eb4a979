"""Files beneath a checkpoint's directory, by names from its metadata, and so from anybody.

csrc/os/beneath.h has the rules.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from torch.distributed.checkpoint.filesystem import FileSystem

from torch_ckpt import _core
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.errors import Unsafe

#: Linux's own limit for paths.
MOST_PATH_BYTES = 4096


def lies_beneath(file: object) -> bool:
    """Whether it names a file in the checkpoint's directory, and none other that we may open."""
    try:
        return (
            isinstance(file, str)
            and len(file.encode()) <= MOST_PATH_BYTES
            and _core.names_file_beneath(file)
        )
    except UnicodeEncodeError:
        return False


def outside(name: str, file: object) -> Unsafe:
    """The error for data that does not lie beneath the directory."""
    shown = repr(file)
    if len(shown) > 200:
        shown = f"{shown[:200]}..."
    return Unsafe(
        f"{name}: the metadata says that its data lies in {shown}, which is not a file in the "
        "checkpoint's directory"
    )


class FilesBeneath(FileSystem):
    """For torch's own reading and writing: files beneath a directory that is open."""

    def __init__(self, directory: OpenDirectory) -> None:
        self._directory = directory

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        """The file's name, by which :meth:`create_stream` opens it."""
        return suffix

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """A stream of the file, which is closed behind the block."""
        opener = self._directory.open_for_read if mode == "rb" else self._open_for_write
        with open(path, mode, opener=opener) as stream:
            yield cast(io.IOBase, stream)

    def _open_for_write(self, name: str, flags: int) -> int:
        try:
            return os.open(name, flags | os.O_NOFOLLOW, 0o666, dir_fd=self._directory.fd)
        except OSError as error:
            path = os.path.join(self._directory.path, name)
            raise OSError(error.errno, error.strerror, path) from None
