"""The part of the engine that needs no torch; see csrc/python. It makes no decisions.

Importing it takes milliseconds. ``torch_ckpt._C`` accepts and returns its classes.
"""

import os
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

from torch_ckpt.saving.background import Background

#: Scratch memory in bytes that each thread of a load takes, where it may.
load_chunk_bytes: int

#: Bytes of a save's chunk, for sources on the host and for sources on CUDA devices.
host_chunk_bytes: int
device_chunk_bytes: int
#: Scratch memory in bytes that a load always takes.
least_scratch_bytes: int

class FaultHook:
    """Tells tests of each fault point that is reached (csrc/os/fault.h) while a ``with`` lasts.

    ``hook(operation, path)`` returns 0, or the errno that the call fails with. It is called from
    any thread, from several at once, and must not raise. One at a time per process.
    """

    def __init__(self, hook: Callable[[str, str], int]) -> None: ...
    def __enter__(self) -> FaultHook: ...
    def __exit__(self, *error: object) -> None: ...

def fault_point(operation: str, path: str | os.PathLike[str] = "") -> None:
    """A point that only Python reaches; raises the OSError that a hook asks for.

    ``operation`` is the call that comes next, or the moment in words.
    """

class Directory:
    """A directory that is held open; see csrc/os/directory.h. It is closed when it is dropped.

    Every call may raise OSError; its ``filename`` is the path of the directory or of the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Links on the way to it are followed, since the caller chose it."""
    @property
    def path(self) -> str:
        """As given."""
    @property
    def fd(self) -> int:
        """The descriptor; -1 after ``close``."""
    def reopen(self) -> Directory:
        """The same directory, with a lock of its own."""
    def share(self, patience: float = 10.0) -> bool:
        """Keeps others from removing files that no metadata names any more.

        ``patience`` are seconds to wait for somebody who has the directory alone, which takes
        milliseconds unless that process is stopped. False where that was too short; nothing is
        kept from anybody then.
        """
    def try_lock_exclusive(self) -> bool:
        """Lock the directory if no other descriptor shares it; this descriptor's share is released.

        False, too, on a file system without locks.
        """
    @property
    def has_locks(self) -> bool:
        """False if the last attempt to lock has found a file system without locks."""
    def identity(self) -> tuple[int, int, int, int]:
        """Device, inode, and seconds and nanoseconds of birth where the file system keeps it."""
    def is_at_path(self) -> bool:
        """Whether the path leads to this directory now."""
    def names(self) -> list[str]:
        """What is in the directory, in no order."""
    def length_of(self, name: str) -> int:
        """The length in bytes of a regular file in it.

        Raises ValueError for another kind of file, Unsafe for a link.
        """
    def open_for_read(self, name: str, flags: int = 0) -> int:
        """A descriptor of a regular file beneath it; no link is followed. For ``opener=`` of open.

        Raises ValueError for another kind of file, Unsafe for a link. ``flags`` are not used.
        """
    def rename(self, source: str, target: str) -> None:
        """Renames a file in it; one that has the new name is replaced."""
    def remove(self, name: str) -> None:
        """Removes a file; one that is not there is not an error."""
    def sync(self) -> None:
        """fsync of the directory."""
    def close(self) -> None:
        """Closes the descriptor and lets go of the lock; once, further calls do nothing."""

#: Where another process finds a channel. Opaque; can be pickled.
ChannelAddress = tuple[int, ...]

class ProcessChannel:
    """Results on their way between processes, in memory. No method but the waits waits for anybody.

    Methods raise OSError where a system call fails: the owner is gone, has no memory or no
    descriptors left.
    """

    def __init__(self) -> None: ...
    @staticmethod
    def at(address: ChannelAddress) -> ProcessChannel:
        """That of another process, to send to."""
    @property
    def address(self) -> ChannelAddress: ...
    def begin(self, what: str) -> None:
        """Tells that this process is going to send an object; ``what`` it does, for a message."""
    def send_object(self, pickled: bytes) -> None: ...
    def take_objects(self) -> list[bytes]:
        """What was sent and has not been taken, oldest first."""
    def take_missed(self) -> list[tuple[int, str]]:
        """Processes that have begun and have ended without an object, each once; what they did."""
    def wait(self, seconds: float) -> None:
        """Waits for an object, a call of ``wake``, or the end of a process that has begun."""
    def wake(self) -> None: ...
    def wait_for_files(self, seconds: float) -> WrittenFiles | bytes | None:
        """In a forked child: the results that a save of the parent's has sent.

        Bytes are an object that was sent in their place; None: the time passed before. Raises the
        save's failure, and CheckpointError where the parent has died.
        """

class WrittenFiles:
    """What one rank has written in one save; its length is the number of values.

    It can be pickled. ``files`` are names, checksum tables, and of each value its number, offset,
    length and CRC-32.
    """

    def __init__(self, files: list[tuple[str, bytes, list[tuple[int, int, int, int]]]]) -> None: ...
    @property
    def names(self) -> list[str]:
        """Of the files."""

    @property
    def tables(self) -> dict[str, bytes]:
        """The checksum table of each file, by its name."""

    def places(self, first: int = 0) -> list[tuple[str, int, int, int]]:
        """Of each value from ``first`` on the file's name, offset and length in bytes there, and
        its CRC-32.
        """

    def __len__(self) -> int: ...

#: Of a seal.
SEAL_BYTES: int

def seal_of(pickled: bytes) -> bytes:
    """What comes behind the pickle in a ``.metadata`` file."""

def bytes_sealed(file: bytes) -> int | None:
    """How many bytes the seal at the end of a ``.metadata`` file covers; None without a seal.

    Raises Corrupt where they are not those that were sealed.
    """

class GlobalPlan:
    """Which rank writes what, of what all ranks tell (``told_of``).

    Raises ValueError where ranks have different things under one name, or the shards of a tensor do
    not make it up. What ranks have written is by rank: the rows that each owns, by their order, and
    behind them what torch plans.
    """

    def __init__(self, told: list[tuple[bytes, bytes]]) -> None: ...
    def owned(self, rank: int) -> list[int]:
        """The rows of its template that a rank writes."""

    def plans(self, name: str) -> bool: ...
    def replicated_names(self, rank: int) -> list[str]:
        """Names of a rank's plain tensors, then names of its objects."""

    def paths(self) -> dict[str, tuple[str | int, ...]]: ...
    def changes(
        self, before: list[WrittenFiles], now: list[WrittenFiles], counter: str
    ) -> tuple[str | None, list[str], dict[str, list[str]]]:
        """The first number beside the ``counter`` that has changed, the groups of tensors of which
        something has changed, and the names of each other group.

        The two are empty where no number has changed.
        """

    def describe(self) -> None:
        """Encodes what metadata says of the plan alone; ``encode`` does it where this was not."""

    def encode(
        self,
        written: list[WrittenFiles],
        rest: CheckpointIndex | None,
        storage_meta: list[tuple[str, str | None]],
        version: str,
        phases: str,
    ) -> bytes:
        """The contents of ``.metadata``, with the entries of names that torch plans from ``rest``.

        Raises CheckpointError where a rank has not told of each of its rows where it lies.
        """

def load_bytes(
    files: list[tuple[str, bytes]],
    rows: list[tuple[str, int, int, int]],
    *,
    directory: Directory,
    threads: int,
    max_inflight_bytes: int,
    direct_io: bool | str,
    verify: bool,
) -> list[bytes]: ...
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
    """What is wrong with records, and the rows of those that have bytes without a checksum.

    A row: file number, offset, length in bytes; name of the dtype and shape of a tensor, None for
    an object. A finding: file number, row (None: the whole file), offset in the file, damaged bytes
    (0: not known), what, the errno of a system call that failed (0: none did).
    """

def names_file_beneath(name: str) -> bool:
    """Whether it may be the name of a file beneath a directory, as far as its text can tell."""

class DirectoryLease:
    """A save's part in a directory; csrc/directory/lease.h has the protocol.

    ``named`` gives the data files that metadata names. It gets the directory and the metadata's
    name; what it raises keeps every file, with a warning. What cannot be removed is warned of.
    """

    def __init__(self, directory: Directory, rank: int | None, patience: float) -> None:
        """``rank``: whose metadata it will be; None: that of all ranks. ``patience``: in seconds.

        Raises OSError, and CheckpointError where somebody has had the directory alone for so long.
        """
    @property
    def tag(self) -> str: ...
    def commit(
        self, metadata: bytes, files: list[str], sync: bool, replace: bool, named: _NamedFiles
    ) -> None:
        """Publishes, removes what no metadata names, ends the lease.

        Raises NotCommitted, DurabilityUncertain.
        """
    def abandon(self, named: _NamedFiles) -> None:
        """Ends it; the save's files go."""
    def remove(self, names: list[str]) -> None: ...
    def close(self) -> None:
        """Ends it and removes nothing."""

_NamedFiles = Callable[[Directory, str], Iterable[str]]

def metadata_name(rank: int | None) -> str: ...
def choose_prefix(directory: Directory, prefix: str, taken: Set[str] = ...) -> str:
    """The prefix of one rank's data files: ``prefix``, tagged where files of this kind are there.

    ``prefix`` is ``__{rank}_``, and the tag of the save where it has one. ``taken`` are those of
    other saves of this process that may not have made their files yet. Raises OSError.
    """

def remove_files(directory: Directory, names: list[str]) -> None:
    """Removes files that are known to be named by no metadata; warns where that fails."""

def remove_own(directory: Directory, names: list[str], named: _NamedFiles) -> None:
    """Removes files of a save that failed, while nobody works in the directory; warns likewise."""

def remove_leftovers(directory: Directory, named: _NamedFiles) -> list[str] | None:
    """Removes what dead saves have left, and returns it; None while somebody works there.

    Raises OSError, and what ``named`` raises.
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
    """Gives a durable file or directory its name, in one step; csrc/directory/publish.h.

    ``aside`` is what a directory is named that has the name; ``renamed`` the directory that
    ``temporary`` must be; ``sync_above`` is False where the directories above are durable.

    Raises OSError, CheckpointError where something was moved, and
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
    """The same of a new file with these contents."""

def tile(whole: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether boxes, given as offsets and sizes and none of them empty, fill a tensor of that size,
    each element once; False where that is hard to tell. See csrc/planning/tiling.h."""

#: Offsets and sizes in elements, file, offset and length in bytes, and whether a stream transform
#: was at work. The file is None where the metadata does not say it.
StoredShard = tuple[tuple[int, ...], tuple[int, ...], str | None, int, int, bool]

class CheckpointIndex:
    """What a checkpoint holds, in arrays; all of it has been checked."""

    def __len__(self) -> int: ...
    def __contains__(self, name: str) -> bool: ...
    def names(self) -> list[str]: ...
    def files(self) -> list[str]: ...
    def tensor(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """The name of a tensor's dtype, without the module, and its size; None of an object."""

    def shards(self, name: str) -> list[StoredShard]:
        """The shards of a tensor, or an object as one without offsets and sizes.

        Raises KeyError where there is no such name.
        """

    def strays(self) -> list[tuple[str, StoredShard]]:
        """Names and places of records that the metadata does not describe."""

    def uncovered(self) -> list[str]:
        """Tensors that their shards do not fill, each element once, or for which that is hard to
        tell."""

    def tables(self) -> dict[str, bytes]:
        """The encoded checksum tables by file."""

    def phases(self) -> str:
        """How long each rank took, as JSON that nobody has checked; "" where that is not known."""

    def rename(self, names: list[str]) -> None:
        """Gives the entries other names, in their order."""

class MetadataProgram:
    """A metadata pickle that is harmless: its program has been walked, and nothing of it has run.

    ``roles`` says by "module name" what the program may do with what a name stands for, in words
    of csrc/index/metadata_pickle.h. Raises Unsafe for other names, Corrupt for all else,
    ValueError for a word that is not a role.
    """

    def __init__(self, data: bytes, roles: dict[str, str]) -> None: ...
    @property
    def end(self) -> int:
        """The number of bytes up to and including STOP."""

    def index(self) -> CheckpointIndex:
        """What the program says of a checkpoint.

        Raises Corrupt for what cannot be, by the name of the entry, and Unsafe for data outside of
        the checkpoint's directory.
        """

def crc32(data: Any, crc: int = 0) -> int:
    """As ``zlib.crc32``, at the speed of the memory. ``data`` has contiguous bytes as a buffer."""

def make_directories(path: str | os.PathLike[str]) -> None: ...
def sync_directory(path: str | os.PathLike[str]) -> None: ...
def join_executor() -> None:
    """Ends the engine's threads after the work they have; for interpreter exit."""

def seconds_without_gil() -> float:
    """The processor time of this thread within calls of the engine that let go of the GIL."""

def pool_bytes() -> int:
    """Host memory in bytes that the chunk pool keeps between saves."""

def trim_pool(bytes: int = 0) -> None:
    """Frees the memory that saves keep for the next one, and a reserve, down to so many bytes."""

def set_reserve(bytes: int, chunk_bytes: int) -> None:
    """What the pool is to keep in any case, in chunks of that size; never shrinks by this."""

def grow_reserve(most_bytes: int, device: int, background: Background | None) -> int:
    """Makes memory until the reserve, or so much of it, is there; the bytes that are.

    By several threads, those of saves with this background or the ordinary ones. For copies from a
    CUDA device, -1 for none, arenas of 64 MiB are page-locked. Raises OSError where there is no
    memory.
    """

def end_reserve() -> None:
    """Lets the reserve be what is there of it."""

def reserve_bytes() -> int:
    """What the pool is to keep in any case."""

def reserved_bytes() -> int:
    """What is there of that, with what saves have taken of it."""
