"""The part of the engine that needs no torch; see csrc/python. It makes no decisions.

Importing it takes milliseconds. ``torch_ckpt._C`` accepts and returns its classes.
"""

import os
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from torch_ckpt.checkpoint.read_options import ReadOptions
from torch_ckpt.saving.background import Background

#: Scratch memory in bytes that each thread of a load uses, if the budget permits.
load_chunk_bytes: int

#: Bytes of a staging chunk, for sources on the host and on CUDA devices.
host_chunk_bytes: int
device_chunk_bytes: int
#: Scratch memory in bytes that every load needs.
least_scratch_bytes: int

class FaultHook:
    """Calls ``hook`` at each fault point (csrc/os/fault.h) while a ``with`` block runs.

    ``hook(operation, path)`` returns 0, or an errno to make the call fail. It may be called from
    several threads at once, and must not raise. A process can have one hook at a time.
    """

    def __init__(self, hook: Callable[[str, str], int]) -> None: ...
    def __enter__(self) -> FaultHook: ...
    def __exit__(self, *error: object) -> None: ...

def fault_point(operation: str, path: str | os.PathLike[str] = "") -> None:
    """Reaches a fault point of Python code. Raises OSError if the hook returns an errno.

    ``operation`` names the next call, or describes the moment.
    """

class Directory:
    """An open directory; see csrc/os/directory.h. Dropping it closes it.

    Every call may raise OSError with the path of the directory or file as ``filename``.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Follows links in the path, because the caller chose it."""
    @property
    def path(self) -> str:
        """The path that was given."""
    @property
    def fd(self) -> int:
        """The descriptor; -1 after ``close``."""
    def reopen(self) -> Directory:
        """Opens the same directory again, with a lock of its own."""
    def share(self, patience: float = 10.0) -> bool:
        """Takes the shared lock, so that no other process removes files.

        Another process has the exclusive lock for milliseconds only, unless it is stopped. Returns
        False, without a lock, if it keeps the lock for ``patience`` seconds.
        """
    def try_lock_exclusive(self) -> bool:
        """Takes the exclusive lock if no other descriptor has a lock; releases the shared lock.

        Returns False on a file system without locks.
        """
    @property
    def has_locks(self) -> bool:
        """False if the last attempt to lock found that the file system has no locks."""
    def identity(self) -> tuple[int, int, int, int]:
        """Device, inode, and seconds and nanoseconds of creation, or 0 if they are not stored."""
    def is_at_path(self) -> bool:
        """True if the path leads to this directory now."""
    def names(self) -> list[str]:
        """Names of all entries, in no particular order."""
    def length_of(self, name: str) -> int:
        """The length in bytes of a regular file in the directory.

        Raises ValueError for another kind of file, Unsafe for a link.
        """
    def open_for_read(self, name: str, flags: int = 0) -> int:
        """Opens a regular file beneath the directory. Use it as ``opener=`` of ``open``.

        Returns a descriptor. Raises ValueError for another kind of file, Unsafe for a link.
        ``flags`` are ignored.
        """
    def rename(self, source: str, target: str) -> None:
        """Renames a file in the directory. Replaces an existing target."""
    def remove(self, name: str) -> None:
        """Removes a file. A missing file is not an error."""
    def sync(self) -> None:
        """Fsyncs the directory."""
    def close(self) -> None:
        """Closes the descriptor and releases the lock. Further calls do nothing."""

#: Address of a channel for other processes. Opaque; can be pickled.
ChannelAddress = tuple[int, ...]

class ProcessChannel:
    """A results channel between processes, in memory. Only the wait methods wait.

    Methods raise OSError if a system call fails: the owner has ended, or there is no memory or no
    free descriptor.
    """

    def __init__(self) -> None: ...
    @staticmethod
    def at(address: ChannelAddress) -> ProcessChannel:
        """The channel of another process, to send to."""
    @property
    def address(self) -> ChannelAddress: ...
    def begin(self, what: str) -> None:
        """Announces that this process will send an object. ``what`` describes it for messages."""
    def send_object(self, pickled: bytes) -> None: ...
    def take_objects(self) -> list[bytes]:
        """Objects that were sent since the last call, oldest first."""
    def take_missed(self) -> list[tuple[int, str]]:
        """Process id and ``what`` of each process that ended between ``begin`` and ``send_object``.

        Each is returned once.
        """
    def wait(self, seconds: float) -> None:
        """Waits for an object, a call of ``wake``, or the end of a process after its ``begin``."""
    def wake(self) -> None: ...
    def wait_for_files(self, seconds: float) -> WrittenFiles | bytes | None:
        """Waits, in a forked child, for the results of a save of the parent.

        Returns the object that was sent in their place as bytes, or None after ``seconds``. Raises
        the save's error, and CheckpointError if the parent has died.
        """

class WrittenFiles:
    """The files that one rank has written in one save; its length is the number of items.

    It can be pickled. ``files`` has the name and checksum table of each file, and the number,
    offset, length and CRC-32 of each item in it.
    """

    def __init__(self, files: list[tuple[str, bytes, list[tuple[int, int, int, int]]]]) -> None: ...
    @property
    def names(self) -> list[str]:
        """Names of the files."""

    @property
    def tables(self) -> dict[str, bytes]:
        """Checksum tables by file name."""

    def places(self, first: int = 0) -> list[tuple[str, int, int, int]]:
        """File name, offset, length in bytes, and CRC-32 of each item from ``first`` on."""

    def __len__(self) -> int: ...

#: Length of a seal.
SEAL_BYTES: int

#: Maximum size of a ``.metadata`` file.
MAX_METADATA_BYTES: int

def seal_of(pickled: bytes) -> bytes:
    """The bytes that follow the pickle in a ``.metadata`` file."""

def bytes_sealed(file: bytes) -> int | None:
    """The number of bytes that the seal of a ``.metadata`` file covers; None without a seal.

    Raises Corrupt if these bytes do not match the seal.
    """

class GlobalPlan:
    """Assigns the values of all ranks to the ranks that write them.

    ``contents`` has the results of ``FlatState.contents``, by rank. Raises ValueError if the values
    of a name differ in kind, dtype or size between ranks, or if the shards of a tensor do not
    cover it. ``before``, ``now`` and ``written`` are by rank; the items of a rank are its assigned
    values, in order, and after them the items planned by torch.
    """

    def __init__(self, contents: list[tuple[bytes, bytes]]) -> None: ...
    def assignment(self, rank: int) -> bytes:
        """The numbers of the values that a rank writes, for ``FlatState.sources``."""

    def plans(self, name: str) -> bool: ...
    def differing_replicas(
        self, fingerprints: list[bytes | None]
    ) -> list[tuple[str, list[list[int]]]]:
        """Names of the values that differ, and the groups of ranks that have the same version.

        ``fingerprints`` has the 4-byte fingerprints of each rank's plain tensors and then of its
        objects; None if a rank sent none. A fingerprint of 0 is not compared.
        """

    def paths(self) -> dict[str, tuple[str | int, ...]]: ...
    def changes(
        self, before: list[WrittenFiles], now: list[WrittenFiles], counter: str
    ) -> tuple[str | None, list[str], dict[str, list[str]]]:
        """Compares two saves: changed number, changed groups, unchanged groups with their names.

        The number is the first object or one-element tensor that has changed, except ``counter``.
        A group is all tensors under one top-level key. Both results for groups are empty if no
        number has changed.
        """

    def describe(self) -> None:
        """Encodes the part of the metadata that depends only on the plan.

        If it was not called, ``encode`` does it.
        """

    def encode(
        self,
        written: list[WrittenFiles],
        rest: CheckpointIndex | None,
        storage_meta: list[tuple[str, str | None]],
        version: str,
        phases: str,
    ) -> bytes:
        """The contents of ``.metadata``. ``rest`` has the entries of items planned by torch.

        Raises Corrupt if a rank has not reported one location for each of its rows.
        """

class ObjectRead:
    """An object to read: its name, and the location of its record.

    ``target`` is for the caller: where the object belongs. Raises Corrupt if the offset or the
    length is not a number of bytes.
    """

    def __init__(
        self, name: str, file: str, offset: int, length: int, target: Any = None
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def file(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def target(self) -> Any: ...

def load_bytes(
    reads: list[ObjectRead],
    *,
    directory: Directory,
    tables: CheckpointIndex | Mapping[str, bytes],
    options: ReadOptions,
) -> list[bytes]:
    """Reads the records of objects. ``tables`` has the checksum table of each file."""

def verify_records(
    files: list[tuple[str, bytes]],
    rows: list[tuple[int, int, int, str | None, tuple[int, ...] | None]],
    *,
    directory: Directory,
    threads: int,
    max_inflight_bytes: int,
    direct_io: bool | str,
    progress: Callable[[int], None] | None,
) -> tuple[list[tuple[int, int | None, int | None, int, str, int]], list[int]]:
    """Verifies records. Returns findings, and the rows with bytes that no checksum covers.

    A row has file number, offset, length in bytes, and the name of the dtype and the shape of a
    tensor (None for an object). A finding has file number, row (None: the whole file), offset in
    the file, damaged bytes (0: unknown), a message, and the errno of a failed system call or 0.
    """

def names_file_beneath(name: str) -> bool:
    """False if the text of the name shows that it cannot name a file beneath a directory."""

class DirectoryLease:
    """A save's hold on a checkpoint's directory; csrc/directory/lease.h has the protocol.

    If a metadata file cannot be read, no file is removed, with a warning. A file that cannot be
    removed is a warning, too.
    """

    def __init__(self, directory: Directory, rank: int | None, patience: float) -> None:
        """Takes the shared lock and chooses a tag.

        ``rank`` is the rank whose metadata the save writes; None: the metadata of all ranks. Raises
        OSError, and CheckpointError if another process holds the exclusive lock for ``patience``
        seconds.
        """
    @property
    def tag(self) -> str: ...
    def commit(self, metadata: bytes, files: list[str], sync: bool, replace: bool) -> None:
        """Publishes the metadata, removes files that no metadata names, and ends the lease.

        Raises NotCommitted and DurabilityUncertain.
        """
    def abandon(self) -> None:
        """Removes the save's files and ends the lease."""
    def remove(self, names: list[str]) -> None: ...
    def close(self) -> None:
        """Ends the lease and removes nothing."""

def metadata_name(rank: int | None) -> str: ...
def choose_prefix(directory: Directory, prefix: str, taken: Set[str] = ...) -> str:
    """Chooses the prefix of one rank's data files: ``prefix``, or the same with a new tag if the
    directory has any metadata, or data files of the rank, or if ``taken`` contains ``prefix``.

    ``prefix`` is ``__{rank}_`` or ``__{rank}_{tag}_``. ``taken`` has the prefixes of other saves of
    this process, which may not have created their files yet. Raises OSError.
    """

def remove_files(directory: Directory, names: list[str]) -> None:
    """Removes files that no metadata names, which the caller has checked. Warns if that fails."""

def remove_own(directory: Directory, names: list[str]) -> None:
    """Removes a failed save's files if no other process holds a lock. Warns if that fails."""

def remove_leftovers(directory: Directory) -> list[str] | None:
    """Removes the files of interrupted saves, and returns the names of these files.

    Returns None if a save or a load holds the directory's lock. Raises OSError, and Unsafe or
    Corrupt if a metadata file cannot be decoded.
    """

def publish(
    directory: Directory,
    temporary: str,
    name: str,
    aside: str | None = None,
    *,
    renamed: Directory | None = None,
    sync: bool = True,
    replace: bool = True,
    sync_above: bool = True,
) -> None:
    """Renames a durable file or directory to its name, in one step; see csrc/directory/publish.h.

    A directory that has the name is first renamed to ``aside``. ``renamed`` is the directory that
    ``temporary`` must be. ``sync_above`` is False if the directories above are already durable.

    Raises OSError, CheckpointError if a directory on the path or ``temporary`` was moved, and
    DurabilityUncertain.
    """

def publish_contents(
    directory: Directory,
    name: str,
    contents: bytes,
    *,
    sync: bool = True,
    replace: bool = True,
    sync_above: bool = True,
) -> None:
    """Writes a file and publishes it as ``publish`` does."""

def first_gap(
    whole: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[int] | None:
    """The first element of a tensor that no box covers; None if there is none.

    ``whole`` is the size of the tensor, which contains all boxes. A box is offsets and sizes.
    """

#: Offsets and sizes in elements, file, offset and length in bytes, and True if it was written
#: through a stream transform. The file is None if the metadata does not give it.
StoredShard = tuple[tuple[int, ...], tuple[int, ...], str | None, int, int, bool]

class CheckpointIndex:
    """The contents of a checkpoint, from its metadata. All values have been checked."""

    def __len__(self) -> int: ...
    def __contains__(self, name: str) -> bool: ...
    def names(self) -> list[str]: ...
    def files(self) -> list[str]: ...
    def tensor(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """Name of a tensor's dtype, without the module, and its size; None for an object."""

    def shards(self, name: str) -> list[StoredShard]:
        """The shards of a tensor. An object has one shard, without offsets and sizes.

        Raises KeyError if there is no such name.
        """

    def strays(self) -> list[tuple[str, StoredShard]]:
        """Names and locations of records that the metadata does not describe."""

    def uncovered(self) -> list[str]:
        """Tensors whose shards do not cover each element exactly once, or that are divided in
        more than six dimensions."""

    def tables(self) -> dict[str, bytes]:
        """Encoded checksum tables by file name."""

    def phases(self) -> str:
        """Durations of each rank's phases, as unchecked JSON; "" if they are unknown."""

    def renamed(self, names: list[str]) -> CheckpointIndex:
        """Returns a copy with other names, which are in the order of the entries."""

def allow_dtypes(names: list[str]) -> None:
    """Adds names of dtypes in the module torch to the names that metadata may contain."""

def allowed_globals() -> dict[str, str]:
    """The names that metadata may contain, as "module name", and their roles; see
    csrc/index/allowed_globals.h."""

def walk_pickle(data: bytes) -> int:
    """Checks that running a metadata pickle is safe. Returns the number of bytes up to STOP.

    Raises Unsafe for names that metadata must not contain, and Corrupt for all other defects.
    """

def decode_index(data: bytes, source: str) -> CheckpointIndex:
    """Decodes the contents of a ``.metadata`` file without running the pickle.

    Raises Unsafe for names that metadata must not contain and for data outside of the checkpoint's
    directory, and Corrupt for all other defects. ``source`` is the origin of the bytes.
    """

def decode_objects(pickled: bytes, source: str) -> CheckpointIndex:
    """Decodes a pickle of torch's ``Metadata`` that this process has made.

    Raises Unsafe and Corrupt.
    """

def crc32(data: Any, crc: int = 0) -> int:
    """Returns the same as ``zlib.crc32``, at memory speed. ``data`` is a contiguous buffer."""

def make_directories(path: str | os.PathLike[str]) -> None: ...
def sync_directory(path: str | os.PathLike[str]) -> None: ...
def join_executor() -> None:
    """Ends the engine's threads after their queued work. For the exit of the interpreter."""

def seconds_without_gil() -> float:
    """Processor time in seconds that this thread spent in engine calls without the GIL."""

def pool_bytes() -> int:
    """Bytes of host memory that the chunk pool keeps between saves."""

def trim_pool(bytes: int = 0) -> None:
    """Frees idle memory of the pool, including the reserve, until ``bytes`` bytes are left."""

def set_reserve(bytes: int, chunk_bytes: int) -> None:
    """Sets the target of the reserve, in chunks of ``chunk_bytes``; never lowers it."""

def grow_reserve(most_bytes: int, device: int, background: Background | None) -> int:
    """Allocates memory until the reserve has ``most_bytes`` or is complete. Returns its bytes.

    Several threads allocate: the threads of saves with this background, or the ordinary ones. For a
    CUDA device (-1: none) the memory is page-locked in arenas of 64 MiB. Raises OSError if memory
    runs out.
    """

def end_reserve() -> None:
    """Lowers the target of the reserve to its present size."""

def reserve_bytes() -> int:
    """Target of the reserve in bytes."""

def reserved_bytes() -> int:
    """Bytes of the reserve that are allocated, including chunks that saves use."""
