"""Options of saves and loads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from torch_ckpt import _core
from torch_ckpt._base.checks import (
    refuse_keyword,
    require_at_least,
    require_instance,
    require_io_options,
)
from torch_ckpt._base.progress import ProgressOption

#: Size in bytes of a staging chunk for sources on the host, and for sources on CUDA devices.
CHUNK_BYTES = _core.host_chunk_bytes
DEVICE_CHUNK_BYTES = _core.device_chunk_bytes

#: By default a rank writes one file per this many bytes or fraction thereof, up to its number of
#: files. For less data a second file would cost an fsync but not make the save faster: nearly all
#: chunks of one file are in flight at once (three per file).
BYTES_PER_FILE = 4 * CHUNK_BYTES

#: By default a rank writes up to this many files concurrently. On the disks measured with
#: benchmarks/files_per_rank.py, fewer files were slower and more files were not faster.
DEFAULT_FILES = 4


@dataclass(frozen=True)
class Background:
    """Threads and priorities of background saves. The lower the priority, the less a save slows
    down training.

    Attributes:
        threads: number of engine threads; 0 starts as many as the files need. Most of these threads
            wait for the disk.
        nice: niceness of the threads, from 0 to 19 (the lowest priority). If the process has a
            higher niceness, the threads use the niceness of the process instead.
        idle_io: use the I/O scheduling class "idle", if the disk's I/O scheduler supports
            scheduling classes. False keeps the I/O scheduling class of the process.
        max_bytes_per_second: maximum rate at which this process writes to the disk; 0 sets no
            limit.

    Raises:
        ValueError: an attribute is out of range.

    Examples:
        ```python
        gentle = torch_ckpt.Background(nice=19, max_bytes_per_second=500_000_000)
        options = torch_ckpt.WriteOptions(background=gentle)
        torch_ckpt.async_save({"model": model}, "checkpoints/100", options=options)
        ```
    """

    threads: int = 0
    nice: int = 10
    idle_io: bool = True
    max_bytes_per_second: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.nice <= 19:
            raise ValueError(f"nice must be between 0 and 19, got {self.nice}")
        if self.threads < 0:
            raise ValueError(f"threads must not be negative, got {self.threads}")
        if self.max_bytes_per_second < 0:
            raise ValueError(
                f"max_bytes_per_second must not be negative, got {self.max_bytes_per_second}"
            )


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """Options of a save.

    Attributes:
        thread_count: number of files that a rank writes concurrently, each with up to two writes in
            flight. None chooses one file per 16 MiB of data (rounded up), but at most 4.
        single_file_per_rank: True groups a rank's items into ``thread_count`` files of similar
            size. False writes one file per item.
        sync_files: fsync files and directories, so that a completed save survives a power cut.
        overwrite: replace any existing checkpoint. The existing checkpoint can be loaded until the
            new checkpoint is committed.
        separation_hint: prefix of fully qualified names. Items with this prefix are written to
            different files than all other items. Requires ``thread_count >= 2``.
        max_host_bytes: maximum host memory for staging on a rank, in bytes; at least 4096. None
            means this rank's share of half of the free memory for a background save, and three 4
            MiB chunks per file for other saves.
        direct_io: True, False, or "auto", which uses direct I/O if the file system supports it.
        progress: see :data:`torch_ckpt._base.progress.ProgressOption`.
        background: threads and priorities of a background save.
        storage_options: credentials and other settings of an object store, as for fsspec; see
            docs/remote.md. Options with these settings cannot be pickled.

    Raises:
        ValueError: an option is out of range or contradicts another one.

    Example::

        options = torch_ckpt.WriteOptions(thread_count=8, direct_io=True)
        torch_ckpt.save({"model": model}, "checkpoints/100", options=options)
    """

    thread_count: int | None = None
    single_file_per_rank: bool = True
    sync_files: bool = True
    overwrite: bool = True
    separation_hint: str | None = None
    max_host_bytes: int | None = None
    direct_io: bool | str = "auto"
    progress: ProgressOption = None
    background: Background = field(default_factory=Background)
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        require_io_options(self.thread_count, self.direct_io)
        require_instance("background", self.background, Background)
        hint = self.separation_hint or ""
        if hint and self.files < 2:
            raise ValueError(
                "separation_hint requires thread_count >= 2, because matching and other items "
                f"go to separate files; got {self.thread_count}"
            )
        # Readers refuse file names with backslashes.
        if "/" in hint or "\\" in hint or hint.startswith("."):
            raise ValueError(
                "separation_hint is used as a prefix of file names, so it must not contain a slash "
                f"or a backslash or begin with a dot, got {hint!r}"
            )
        if self.max_host_bytes is not None:
            require_at_least("max_host_bytes", self.max_host_bytes, 4096)

    def __getstate__(self) -> dict[str, Any]:
        _refuse_secrets(self.storage_options)
        # Progress bars and callbacks belong to the caller's process.
        return self.__dict__ | {"progress": None}

    @property
    def files(self) -> int:
        """Number of files that a rank writes concurrently, at most."""
        return DEFAULT_FILES if self.thread_count is None else self.thread_count

    @property
    def bytes_per_file(self) -> int:
        """Bytes for which a rank starts another file; 0 if the number of files is fixed."""
        # If the caller chose a number of files, use it even if little is written.
        return BYTES_PER_FILE if self.thread_count is None else 0


DEFAULT_OPTIONS = WriteOptions()


#: The smallest max_inflight_bytes: with less memory, a load would be mostly overhead.
LEAST_INFLIGHT_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Options of a load.

    Attributes:
        thread_count: maximum number of concurrent reads; None means 8. Each read covers at least 1
            MiB, so small loads use fewer concurrent reads.
        max_inflight_bytes: maximum memory that a load uses in addition to its targets, in bytes; at
            least 1 MiB. Some records cannot be read in parts: objects, and tensors that only
            ``torch.load`` can decode. If such a record is larger than the limit, the load fails.
        verify: verify CRC-32 checksums.
        direct_io: True, False, or "auto", which uses direct I/O for data that is not in the page
            cache, unless several ranks of a machine load the same data.
        zero_fill: allow tensors in the state dict that are larger than the stored tensors. The
            elements outside the stored tensor are set to zero.
        allow_shape_mismatch: like ``zero_fill``, but also allow tensors in the state dict that are
            smaller than the stored tensors in some dimensions. The common region is loaded. The
            number of dimensions must be the same.
        read_once: if several ranks need the same contiguous tensor, one of the ranks reads the
            tensor and sends the data to the other ranks over the process group. Beneath a URL, one
            rank also reads the metadata for all ranks. All ranks of the group must load with this
            option.
        progress: see :data:`torch_ckpt._base.progress.ProgressOption`.
        allow_pickle: accept metadata that names any type, and unpickle objects of any type. Use
            this option only for checkpoints that you trust. By default, only tensors, builtin
            types, other allow-listed types (see SECURITY.md) and types declared with
            ``torch.serialization.add_safe_globals`` are loaded.
        storage_options: see :class:`WriteOptions`.

    Raises:
        ValueError: an option is out of range.

    Example::

        options = torch_ckpt.ReadOptions(max_inflight_bytes=1 << 30)
        torch_ckpt.load({"model": model}, "checkpoints/100", options=options)
    """

    thread_count: int | None = None
    max_inflight_bytes: int = 32 * 10**9
    verify: bool = True
    direct_io: bool | str = "auto"
    zero_fill: bool = False
    allow_shape_mismatch: bool = False
    read_once: bool = False
    progress: ProgressOption = None
    allow_pickle: bool = False
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        require_io_options(self.thread_count, self.direct_io)
        require_at_least("max_inflight_bytes", self.max_inflight_bytes, LEAST_INFLIGHT_BYTES)

    def __getstate__(self) -> dict[str, Any]:
        _refuse_secrets(self.storage_options)
        return self.__dict__

    @property
    def threads(self) -> int:
        """Number of concurrent reads. The default may exceed the number of cores, because the
        threads wait for the disk."""
        return self.thread_count or 8

    @property
    def lets_sizes_differ(self) -> bool:
        """True if tensors in the state dict may have other sizes than the stored tensors."""
        return self.zero_fill or self.allow_shape_mismatch


DEFAULT_READ_OPTIONS = ReadOptions()


def _refuse_secrets(storage_options: Mapping[str, Any] | None) -> None:
    """Raises TypeError if options with credentials are to be pickled."""
    if storage_options is not None:
        raise TypeError(
            "options with storage_options cannot be pickled, because these may contain "
            "credentials. Set the credentials of the other process in its environment"
        )


def named_options(options: WriteOptions | ReadOptions) -> dict[str, Any]:
    """Returns the options by name, for the classes of DCP's contract."""
    return {option.name: getattr(options, option.name) for option in fields(options)}


def refuse_options(caller: Callable[..., Any], given: Iterable[str], **typed: type) -> NoReturn:
    """Raises TypeError for keywords that belong into an argument with several options.

    Args:
        caller: the function or class that the user called.
        given: the keywords.
        typed: the types of the arguments with options, :class:`WriteOptions` or
            :class:`ReadOptions`.
    """
    refuse_keyword(
        caller,
        given,
        {
            f"{argument}=torch_ckpt.{kind.__name__}(...)": [option.name for option in fields(kind)]
            for argument, kind in typed.items()
        },
    )
