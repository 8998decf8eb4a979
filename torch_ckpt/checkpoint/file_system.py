"""A file system for torch's code that accesses files in an open checkpoint directory."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from torch.distributed.checkpoint.filesystem import FileSystem

from torch_ckpt.checkpoint.directory import OpenDirectory


class FilesBeneath(FileSystem):
    """Opens files relative to an open directory, for torch's own reading and writing."""

    def __init__(self, directory: OpenDirectory) -> None:
        self._directory = directory

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        """Returns the file name, which :meth:`create_stream` accepts as a path."""
        return suffix

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Context manager that opens a file and closes it at the end of the block."""
        opener = self._directory.open_for_read if mode == "rb" else self._open_for_write
        with open(path, mode, opener=opener) as stream:
            yield cast(io.IOBase, stream)

    def _open_for_write(self, name: str, flags: int) -> int:
        try:
            return os.open(name, flags | os.O_NOFOLLOW, 0o666, dir_fd=self._directory.fd)
        except OSError as error:
            path = os.path.join(self._directory.path, name)
            raise OSError(error.errno, error.strerror, path) from None
