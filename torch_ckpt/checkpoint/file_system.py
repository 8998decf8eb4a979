"""Parts of our reader and writer: the arguments of torch's classes, and their file systems."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict, cast

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemWriter,
    SerializationFormat,
)

from torch_ckpt._base.progress import ProgressOption
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.options import Background


class ReaderArguments(TypedDict, total=False):
    """Keywords of :class:`FileSystemReader` that its subclasses pass on."""

    _extension_registry: object
    thread_count: int | None
    max_inflight_bytes: int
    verify: bool
    direct_io: bool | str
    zero_fill: bool
    allow_shape_mismatch: bool
    read_once: bool
    process_group: dist.ProcessGroup | None
    progress: ProgressOption
    allow_pickle: bool
    storage_options: Mapping[str, Any] | None


class WriterArguments(TypedDict, total=False):
    """Keywords of :class:`FileSystemWriter` that its subclasses pass on."""

    single_file_per_rank: bool
    sync_files: bool
    thread_count: int | None
    per_thread_copy_ahead: int
    cache_staged_state_dict: bool
    overwrite: bool
    _extensions: Sequence[Any] | None
    serialization_format: SerializationFormat
    max_host_bytes: int | None
    direct_io: bool | str
    progress: ProgressOption
    background: Background
    storage_options: Mapping[str, Any] | None


class OnAnyFileSystem:
    """Base of our reader and writer: the path that the caller has given.

    Subclasses may use another file system, as torch's ``FsspecWriter`` does. Then torch's own code
    reads or writes.
    """

    fs: FileSystem
    _given_path: str | os.PathLike[str]

    def _give_path(self, path: str | os.PathLike[str] | None) -> None:
        """Receives the path of the next save or load; None keeps the last path."""
        self._given_path = path or self._given_path

    def _is_local(self) -> bool:
        """Returns False if torch's own code accesses the files, through ``fs``."""
        return type(self.fs) is FileSystem


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


@contextmanager
def torch_writes(writer: FileSystemWriter, directory: OpenDirectory | None) -> Iterator[None]:
    """Block in which torch's own code writes.

    Args:
        writer: torch's writer, with its options.
        directory: the checkpoint directory; the files are opened relative to it and, if
            ``sync_files`` is set, it is fsynced. None for a remote file system.
    """
    thread_count, fs = writer.thread_count, writer.fs
    # With several threads, torch loses exceptions of its workers and reports success.
    writer.thread_count = 1
    if directory is not None:
        writer.fs = FilesBeneath(directory)
    try:
        yield
    finally:
        writer.thread_count, writer.fs = thread_count, fs
    if directory is not None and writer.sync_files:
        directory.sync()
