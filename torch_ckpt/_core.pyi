"""The part of the engine that needs no torch; see csrc/python. It makes no decisions.

Importing it takes milliseconds. ``torch_ckpt._C`` accepts and returns its classes.
"""

import os
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, ClassVar

from typing_extensions import Buffer

from torch_ckpt._base.in_store import InStore
from torch_ckpt.options import Background, ReadOptions

class FaultHook:
    """Calls ``hook`` at each fault point (csrc/os/fault.h) while a ``with`` block runs.

    ``hook(operation, path)`` returns 0, or an errno to make the call fail. It may be called from
    several threads at once, and must not raise. A process can have one hook at a time.
    """
    def __init__(self, hook: Callable[[str, str], int]) -> None: ...
    def __enter__(self) -> FaultHook: ...
    def __exit__(self, *args: object) -> None: ...

def fault_point(operation: str, path: str | os.PathLike[str] = "") -> None:
    """Reaches a fault point of Python code. Raises OSError if the hook returns an errno.

    ``operation`` names the next call, or describes the moment.
    """

class CheckpointIndex:
    """The contents of a checkpoint, from its metadata. All values have been checked."""
    def __len__(self) -> int: ...
    def __contains__(self, name: str) -> bool: ...
    def names(self) -> list[str]: ...
    def files(self) -> list[str]: ...
    def tensor(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """Name of a tensor's dtype, without the module, and its size; None for an object."""
    def shards(
        self, name: str
    ) -> list[tuple[tuple[int, ...], tuple[int, ...], str | None, int, int, bool]]:
        """The shards of a tensor: offsets and sizes in elements, file, offset and length in
        bytes, and True if it was written through a stream transform. The file is None if the
        metadata does not give it. An object has one shard, without offsets and sizes.

        Raises KeyError if there is no such name.
        """
    def undescribed_records(
        self,
    ) -> list[tuple[str, tuple[tuple[int, ...], tuple[int, ...], str | None, int, int, bool]]]:
        """Names and locations of records that the metadata does not describe."""
    def uncovered(self) -> dict[str, str]:
        """Describes the first element that no shard covers, for each tensor that has one."""
    @property
    def stored_bytes(self) -> int:
        """Total length of all shards in their files."""
    @property
    def has_transformed(self) -> bool:
        """True if stream transforms have changed any record. Only torch can read such records."""
    def tables(self) -> dict[str, bytes]:
        """Encoded checksum tables by file name."""
    def renamed(self, names: list[str]) -> CheckpointIndex:
        """Returns a copy with other names, which are in the order of the entries."""

class EncodedMetadata:
    """The contents of a ``.metadata`` file. Saves with the same plan share the parts that do not
    differ.
    """
    def __init__(self, contents: bytes) -> None: ...
    def __len__(self) -> int: ...
    def __bytes__(self) -> bytes: ...
    @property
    def seal(self) -> bytes: ...

class SafetensorsFile:
    """A safetensors file whose header has been read."""
    @property
    def name(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def header_crc(self) -> int:
        """CRC-32 of the bytes before the data."""
    @property
    def has_stale_checksums(self) -> bool:
        """True if the file has changed since its checksums were saved."""

class SafetensorsFiles:
    """The contents of safetensors files, without the data."""
    @property
    def index(self) -> CheckpointIndex: ...
    @property
    def metadata(self) -> dict[str, str]: ...
    @property
    def files(self) -> list[SafetensorsFile]: ...

def read_safetensors(directory: Directory | InStore, name: str) -> SafetensorsFiles:
    """Reads the headers of safetensors files in a directory.

    ``name`` is the name of one file, or of an index that names the file of each tensor. Raises
    Corrupt, Unsafe and OSError.
    """

def require_safe(name: str, dtype: str, sizes: Sequence[int]) -> None:
    """Raises CheckpointError with the reason if safetensors files cannot hold a tensor."""

def encode_safetensors_header(
    tensors: Sequence[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str], alignment: int
) -> bytes:
    """Returns the bytes of a safetensors file before the data.

    The data must follow in the order of the tensors, which are given by name, dtype and sizes.
    It then begins at a multiple of ``alignment``. Raises CheckpointError if :func:`require_safe`
    does, or if the header is larger than readers accept.
    """

MAX_METADATA_BYTES: int

def bytes_sealed(file: Buffer) -> int | None:
    """The number of bytes that the seal of a ``.metadata`` file covers; None without a seal.

    Raises Corrupt if these bytes do not match the seal.
    """

def seal_of(pickled: bytes) -> bytes:
    """The bytes that follow the pickle in a ``.metadata`` file."""

def describe_gap(
    size: Sequence[int],
    boxes: Sequence[tuple[Sequence[int], Sequence[int]]],
    offsets: Sequence[int],
) -> str | None:
    """Describes the first element that no box covers; None if the boxes cover everything.

    ``size`` is the size, in elements, of the covered part, which is at ``offsets`` in its
    tensor. A box is offsets in this part, and sizes.
    """

def allow_dtypes(names: list[str]) -> None:
    """Adds names of dtypes in the module torch to the names that metadata may contain."""

def allowed_globals() -> dict[str, str]:
    """The names that metadata may contain, as "module name", and their roles; see
    csrc/index/allowed_globals.h.
    """

def walk_pickle(data: Buffer) -> int:
    """Checks that running a metadata pickle is safe. Returns the number of bytes up to STOP.

    Raises Unsafe for names that metadata must not contain, and Corrupt for all other defects.
    """

def decode_index(data: Buffer, source: str) -> CheckpointIndex:
    """Decodes the contents of a ``.metadata`` file without running the pickle.

    Raises Unsafe for names that metadata must not contain and for data outside of the
    checkpoint's directory, and Corrupt for all other defects. ``source`` is the origin of the
    bytes.
    """

def decode_objects(pickled: Buffer, source: str) -> CheckpointIndex:
    """Decodes a pickle of torch's ``Metadata`` that this process has made.

    Raises Unsafe and Corrupt.
    """

MARKER_NAME: str
PINNED_NAME: str
LOCK_NAME: str
LEASE_NAME: str

class Directory:
    """An open directory; see csrc/os/directory.h. Dropping it closes it.

    Every call may raise OSError with the path of the directory or file as ``filename``.
    """
    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Follows links in the path, because the caller chose it."""
    @property
    def path(self) -> str: ...
    @property
    def fd(self) -> int:
        """The descriptor; -1 after ``close``."""
    def share(self, patience: float = 10.0) -> bool:
        """Takes the shared lock, so that no other process removes files.

        Another process has the exclusive lock for milliseconds only, unless it is stopped.
        Returns False, without a lock, if it keeps the lock for ``patience`` seconds.
        """
    def try_lock_exclusive(self) -> bool:
        """Takes the exclusive lock if no other descriptor has a lock; releases the shared lock.

        Returns False on a file system without locks.
        """
    @property
    def has_locks(self) -> bool:
        """False if the last attempt to lock found that the file system has no locks."""
    @property
    def is_local(self) -> bool:
        """True if no other host can change the directory, by the type of its file system."""
    def identity(self) -> tuple[int, int, int, int]:
        """Device, inode, and seconds and nanoseconds of creation, or 0 if they are not stored."""
    def is_at_path(self) -> bool:
        """True if the path leads to this directory now."""
    def names(self) -> list[str]:
        """Names of all entries, in no particular order."""
    def contains(self, name: str) -> bool:
        """True if there is an entry of this name. False also if the system does not report it."""
    def refresh(self, name: str) -> None:
        """Makes the client of a network file system look a name up again.

        Does nothing if the directory is local.
        """
    def length_of(self, name: str) -> int:
        """The length in bytes of a regular file in the directory.

        Raises ValueError for another kind of file, Unsafe for a link.
        """
    def open_directory(self, name: str) -> Directory:
        """Opens a directory in this one. Does not follow a link."""
    def open_for_read(self, name: str, flags: int = 0) -> int:
        """Opens a regular file beneath the directory. Pass it to ``open`` as its opener.

        Returns a descriptor. Raises ValueError for another kind of file, Unsafe for a link.
        ``flags`` are ignored.
        """
    def remove(self, name: str) -> None:
        """Removes a file. A missing file is not an error."""
    def remove_lock_file(self) -> None:
        """Closes and removes the file of the lock, so that the directory can be removed."""
    def sync(self) -> None: ...
    def bytes(self) -> int:
        """Total size of the files, without subdirectories."""
    def close(self) -> None:
        """Closes the descriptor and releases the lock. Further calls do nothing."""

class NewFile:
    """A file that is written from its beginning to its end; see csrc/engine/new_file.h.

    ``bytes`` are reserved on the disk. ``direct_io`` is the option of WriteOptions. Every call
    may raise OSError; then the caller removes the file. Dropping the object closes the file.
    """
    def __init__(
        self, directory: Directory, name: str, bytes: int, direct_io: bool | str = "auto"
    ) -> None:
        """Raises ValueError if ``direct_io`` is True and the file system does not support it."""
    def write(self, data: Buffer) -> None: ...
    def finish(self, sync: bool) -> None:
        """Fsyncs the file if ``sync`` is true, and closes it."""

class DirectoryLease:
    """A save's hold on a checkpoint's directory; csrc/directory/lease.h has the protocol.

    If a metadata file cannot be read, no file is removed, with a warning. A file that cannot be
    removed is a warning, too.
    """
    def __init__(self, directory: Directory, rank: int | None, patience: float) -> None:
        """Takes the shared lock and chooses a tag.

        ``rank`` is the rank whose metadata the save writes; None: the metadata of all ranks.
        Raises OSError, and CheckpointError if another process holds the exclusive lock for
        ``patience`` seconds.
        """
    @property
    def tag(self) -> str: ...
    def commit(
        self, metadata: EncodedMetadata, files: list[str], sync: bool, replace: bool
    ) -> None:
        """Publishes the metadata, removes files that no metadata names, and ends the lease.

        Raises NotCommitted and DurabilityUncertain.
        """
    def discard(self) -> None:
        """Removes the save's files and ends the lease."""
    def remove(self, names: list[str]) -> None: ...
    def close(self) -> None:
        """Ends the lease and removes nothing."""

def metadata_name(rank: int | None) -> str: ...
def choose_prefix(directory: Directory, prefix: str, taken: Set[str] = set()) -> str:
    """Chooses the prefix of one rank's data files: ``prefix``, or the same with a new tag if the
    directory has any metadata, or data files of the rank, or if ``taken`` contains ``prefix``.

    ``prefix`` is ``__{rank}_`` or ``__{rank}_{tag}_``. ``taken`` has the prefixes of other saves
    of this process, which may not have created their files yet. Raises OSError.
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
) -> None:
    """Renames a durable file or directory to its name, in one step; see
    csrc/directory/publish.h.

    A directory that has the name is first renamed to ``aside``. ``renamed`` is the directory
    that ``temporary`` must be.

    Raises OSError, CheckpointError if a directory on the path or ``temporary`` was moved, and
    DurabilityUncertain.
    """

def publish_contents(
    directory: Directory, name: str, contents: Buffer, *, replace: bool = True
) -> None:
    """Writes a file and publishes it as ``publish`` does."""

class StepRoot:
    """The root of a run's steps; csrc/directory/step.h has the protocol."""
    def __init__(self, path: str | os.PathLike[str]) -> None: ...
    def remove(self, name: str, lease: bytes | None = None) -> bool:
        """Removes a step or leftover.

        Returns False if a process is using it. Raises OSError: it does not exist or cannot be
        removed, or the root's path refers to a different directory than at the last save. Raises
        RootInUse if ``lease`` is given and the lease on the root has other bytes.
        """
    def sweep(
        self,
        deleted_only: bool,
        attempt: str,
        lease: bytes | None = None,
        superseded: list[str] = [],
    ) -> tuple[list[str], list[str]]:
        """Finishes interrupted work. Spares the unfinished steps of ``attempt``, and completes
        none of the directories ``superseded``.

        Returns the names of the removed leftovers, and a message for each that could not be
        removed. Raises OSError if the root cannot be listed, and RootInUse as ``remove`` does.
        """

class StepSave:
    """The coordinator's part of the save of a step, after all ranks have written their files.

    ``unfinished`` is the directory in which the save has written, ``digits`` the step's name.
    """
    def __init__(self, steps: StepRoot, unfinished: Directory, digits: str) -> None: ...
    def find_missing(self, files: list[str], patience: float) -> list[str]:
        """Waits until the directory contains the files. Returns those that are missing after
        ``patience`` seconds.
        """
    def size(self) -> int:
        """Total size of the files."""
    def publish(
        self, marker: Buffer, *, replace: bool, sync: bool, lease: bytes | None = None
    ) -> None:
        """Completes the step after the metadata was committed. Removes the files if that fails.

        Raises OSError, CheckpointError if the root or the directory was moved,
        DurabilityUncertain, and RootInUse as ``StepRoot.remove`` does.
        """
    @property
    def is_published(self) -> bool:
        """True once ``publish`` has renamed the directory, or may have done so."""
    @property
    def replaced(self) -> str:
        """The new name of the step that was replaced; empty if there was none."""
    def discard(self) -> None:
        """Removes the files of a save that has failed before ``publish``."""

class StepKind:
    """Kinds of directories beneath a root, distinguished by name."""

    STEP: ClassVar[StepKind]
    UNFINISHED: ClassVar[StepKind]
    DELETED: ClassVar[StepKind]

def parse_step_name(name: str) -> tuple[str, StepKind] | None:
    """The ten digits and the kind of a step or leftover; None for any other name."""

def unfinished_step_name(digits: str, attempt: str) -> str:
    """The name of the directory into which a step is written. ``attempt`` is 8 hex digits."""

def pin_step(step: Directory) -> None:
    """Pins a step, and makes the pin durable."""

class RootLock:
    """The lock on a root; csrc/directory/root_lock.h. Waits for it for ``patience`` seconds."""
    def __init__(self, root: Directory, patience: float) -> None: ...
    @property
    def is_held(self) -> bool:
        """False if another thread or process holds the lock."""
    def release(self) -> None: ...

def own_process() -> dict[str, Any]:
    """This process: ``host``, ``boot``, ``pids``, ``pid`` and ``start``; see csrc/os/process.h."""

def is_alive(pid: int, start: int) -> bool:
    """Returns False if a process of this host has ended. 0 is an unknown start time."""

def names_file_beneath(name: str) -> bool:
    """False if the text of the name shows that it cannot name a file beneath a directory."""

def make_directories(path: str | os.PathLike[str]) -> None: ...

class WrittenFiles:
    """The files that one rank has written in one save; its length is the number of items.

    It can be pickled. ``files`` has the name and checksum table of each file, and the number,
    offset, length and CRC-32 of each item in it.
    """
    def __init__(
        self, files: Sequence[tuple[str, bytes, Sequence[tuple[int, int, int, int]]]]
    ) -> None: ...
    @property
    def names(self) -> list[str]: ...
    @property
    def tables(self) -> dict[str, bytes]:
        """Checksum tables by file name."""
    def locations(self, first: int = 0) -> list[tuple[str, int, int, int]]:
        """File name, offset, length in bytes, and CRC-32 of each item from ``first`` on."""
    def __len__(self) -> int: ...

class ProcessChannel:
    """A results channel between processes, in memory. Only the wait methods wait.

    Methods raise OSError if a system call fails: the owner has ended, or there is no memory or
    no free descriptor.
    """
    def __init__(self) -> None: ...
    @staticmethod
    def at(address: tuple[int, int, int, int, int, int, int, int]) -> ProcessChannel:
        """The channel of another process, to send to."""
    @property
    def address(self) -> tuple[int, int, int, int, int, int, int, int]: ...
    def send_object(self, pickled: Buffer) -> None: ...
    def begin(self, what: str) -> None:
        """Announces that this process will send an object. ``what`` describes it for messages."""
    def take_objects(self) -> list[bytes]:
        """Objects that were sent since the last call, oldest first."""
    def take_missed(self) -> list[tuple[int, str]]:
        """Process id and ``what`` of each process that ended between ``begin`` and
        ``send_object``.

        Each is returned once.
        """
    def wait(self, seconds: float) -> None:
        """Waits for an object, a call of ``wake``, or the end of a process after its ``begin``."""
    def wake(self) -> None: ...
    def wait_for_files(self, seconds: float) -> WrittenFiles | bytes | None:
        """Waits, in a forked child, for the results of a save of the parent.

        Returns the object that was sent in their place as bytes, or None after ``seconds``.
        Raises the save's error, and CheckpointError if the parent has died.
        """

load_chunk_bytes: int
least_scratch_bytes: int

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
    reads: Sequence[ObjectRead],
    *,
    directory: Directory | InStore,
    tables: CheckpointIndex | dict[str, bytes],
    options: ReadOptions,
) -> list[bytes]:
    """Reads the records of objects. ``tables`` has the checksum table of each file."""

class RankPlan:
    """The plan of one rank for the saves of a group (csrc/planning/save_coordinator.h).

    ``structure`` is the result of ``FlatState.contents``.
    """
    def __init__(self) -> None: ...
    def message(
        self, structure: tuple[bytes, bytes], fingerprints: bytes | None, with_parts: bool = False
    ) -> tuple[bytes | None, bytes]:
        """The template, or None if the rank has the plan, and the message to the coordinator."""
    def accept(self, structure: tuple[bytes, bytes], reply: bytes) -> None: ...
    @property
    def items(self) -> bytes:
        """The numbers of the items that the rank writes, for ``FlatState.sources``."""
    @property
    def copies(self) -> bytes:
        """The numbers of the items that must be copies of other ranks' items, for
        ``FlatState.checksums``.
        """

class SaveCoordinator:
    """The plans of all ranks. ``before``, ``now`` and ``written`` are by rank."""
    def __init__(self) -> None: ...
    def assign(self, messages: Sequence[tuple[bytes | None, bytes]]) -> list[bytes]:
        """The replies, by rank; empty if all ranks must send their parts.

        Raises CheckpointError if the values of a name differ in kind, dtype or size between
        ranks, or if the shards of a tensor do not cover it, on each of its meshes.
        """
    @property
    def plan_hash(self) -> int:
        """A number that is equal for plans of the same states, in this process."""
    def names(self) -> list[str]:
        """The fully qualified names of all values."""
    def bytes_by_rank(self) -> list[int]:
        """The bytes of plain tensors and DTensors that each rank writes."""
    def differing_replicas(self) -> list[tuple[str, list[list[int]]]]:
        """Names of the values whose fingerprints differ in the last messages, and the groups of
        ranks that have the same version.
        """
    def differing_copies(
        self, checksums: Sequence[bytes]
    ) -> list[tuple[str, list[list[int]], list[list[int]]]]:
        """Sharded tensors that are not copies, given the checksums of each rank.

        Returns the name of each, the groups of ranks that have the same version, and the ranks
        of each mesh.
        """
    def changes(
        self, before: Sequence[WrittenFiles], now: Sequence[WrittenFiles], counter: str
    ) -> tuple[str | None, dict[str, list[str]]]:
        """Compares two saves: changed number, and the unchanged groups with their names.

        The number is the first object or one-element tensor that has changed, except
        ``counter``. A group is all tensors under one top-level key. There are no groups if no
        number has changed.
        """
    def describe(self) -> None:
        """Encodes the part of the metadata that depends only on the plan.

        If it was not called, ``encode`` does it.
        """
    def encode(
        self,
        written: Sequence[WrittenFiles],
        storage_meta: Sequence[tuple[str, str | None]],
        version: str,
    ) -> EncodedMetadata:
        """The contents of ``.metadata``.

        Raises Corrupt if a rank has not reported one location for each of its items.
        """

DELTA_NAME: str
LATEST_NAME: str

def update_latest(root: Directory, sync: bool) -> None:
    """Makes the link ``latest`` in the root of versions lead to the newest one.

    Raises OSError, and FileExistsError if it is not a link.
    """

class Delta:
    """A delta, which is read into memory; csrc/engine/delta.h describes how it is applied.

    Raises OSError, and Corrupt if it is damaged.
    """
    def __init__(self, directory: Directory, name: str) -> None: ...
    @property
    def base(self) -> str: ...
    def tensors(self) -> list[tuple[str, str, list[int]]]:
        """Name, dtype and shape of each tensor of the version."""
    def apply(self, targets: Sequence[Buffer]) -> None:
        """Changes the memory of each of the ``tensors``, in place: contiguous, writable buffers.
        After a success, the delta must not be used again.

        Raises CheckpointError if a target does not have the values of the base, Corrupt if the
        delta is damaged, and ValueError if targets share memory.
        """
    def write_files(self, base: Directory, to: Directory) -> None:
        """Writes the version's safetensors files. Raises as ``apply`` does, and OSError."""

class SafetensorsLayout:
    """The files of a model in Hugging Face's layout; see csrc/planning/safetensors_layout.h.

    Floating-point tensors are stored with the dtype ``cast``; None keeps each tensor's dtype. A
    file has at most ``max_shard_bytes`` bytes of tensors, or one larger tensor. ``metadata`` is
    stored in each file. Raises CheckpointError if the files cannot hold a value.
    """
    def __init__(
        self,
        coordinator: SaveCoordinator,
        names: list[str] | None,
        cast: str | None,
        max_shard_bytes: int,
        metadata: Sequence[tuple[str, str]],
        tag: str = "",
    ) -> None:
        """Lays out the values of a plan. ``names`` has new names, in the order of the plan's.
        ``tag`` becomes part of the names of the files, which then have an index in any case.
        """
    @staticmethod
    def of_tensors(
        tensors: Sequence[tuple[str, str, Sequence[int]]],
        cast: str | None,
        max_shard_bytes: int,
        metadata: Sequence[tuple[str, str]],
    ) -> SafetensorsLayout:
        """Lays out tensors, given the name, dtype and size of each."""
    def files(self) -> list[tuple[str, int]]:
        """The name of each file, and its size in bytes."""
    @property
    def index(self) -> bytes:
        """The contents of the index; empty if a single file has none."""
    def checksums(
        self, extras: Sequence[tuple[str, bytes]], written: Sequence[Mapping[str, bytes]]
    ) -> bytes:
        """The contents of the file of checksums, from the arguments of ``ModelSave.complete``.
        ``extras`` includes the index. Raises Corrupt if the ranks have not written all bytes.
        """
    def object_files(
        self, coordinator: SaveCoordinator, assembles_all: bool
    ) -> tuple[list[bytes], list[list[bytes]], list[list[tuple[int, str, int]]]]:
        """Decides which rank writes each file; see csrc/planning/object_files.h.

        Returns, by rank: the places of the values, for ``FlatState.parts``; the files that the
        rank assembles, for ``FileAssembly``; and the receiver, the file and the size of each
        stream that the rank sends, in the order of the files.
        """
    def interleaves(self, coordinator: SaveCoordinator, hosts: list[str]) -> bool:
        """True if ranks of several hosts would write to the same ranges of a file, in short
        runs.

        ``hosts`` are the hosts of the ranks.
        """
    def shares_files(self, coordinator: SaveCoordinator, hosts: list[str]) -> bool:
        """True if ranks of several hosts would write to one file."""
    def places_of_plan(self, coordinator: SaveCoordinator, offers: Sequence[bytes]) -> list[bytes]:
        """The places of each rank's values, for ``FlatState.parts``.

        ``offers`` are the addresses of the memory that each rank offers to the ranks of its
        machine; an empty one if it offers none.
        """
    def places_of_parts(
        self,
        parts: Sequence[Sequence[tuple[int, Sequence[int], Sequence[int]]]],
        offers: Sequence[bytes],
    ) -> list[bytes]:
        """The places of each rank's parts, for ``SaveSources.set_places``.

        A part is the number of its tensor, and its offsets and size in the tensor.
        """

class MemoryFile:
    """Memory that a rank offers to the ranks of its machine, to collect short writes."""
    @property
    def address(self) -> bytes: ...

def offer_memory() -> MemoryFile | None:
    """Offers memory. Returns None if other processes could not use it. The memory is allocated
    when a rank uses it.
    """

class ModelSave:
    """The coordinator's part of a save in Hugging Face's layout; csrc/directory/model_save.h has
    the protocol.

    Creates a directory beside ``name`` in ``parent``. Raises OSError, and FileExistsError if the
    directory ``name`` exists and must not be replaced.
    """
    def __init__(self, parent: Directory, name: str, replace: bool, extras: list[str]) -> None:
        """``extras`` has the names of the files that ``complete`` receives."""
    @property
    def temporary(self) -> str:
        """The name of the new directory."""
    def complete(
        self,
        layout: SafetensorsLayout,
        extras: Sequence[tuple[str, bytes]],
        written: Sequence[Mapping[str, bytes]],
        sync: bool,
    ) -> None:
        """Writes headers, the index, other files and checksums, after all ranks have written.

        ``extras`` has the names and contents of the other files; ``written`` has each rank's
        ``WrittenFiles.tables``. Raises OSError, and Corrupt if a file does not have its size.
        """
    def complete_version(self, delta: Delta, sync: bool) -> None:
        """Completes a directory to which ``Delta.write_files`` has written. Raises as
        ``complete`` does.
        """
    def link_unchanged(self, base: Directory, sync: bool) -> None:
        """Replaces each file that ``base`` contains with the same name and bytes by a hard link.
        Warns of a file that cannot be linked. Raises OSError.
        """
    def write_delta(self, base: Directory, name: str, sync: bool) -> None:
        """Writes the delta from ``base``, which ``name`` names in messages, to the directory.

        Raises OSError, ValueError if ``base`` has no checksums, and Corrupt if a file of either
        directory does not match them.
        """
    def publish(self, sync: bool) -> None:
        """Gives the directory its name. Raises OSError and DurabilityUncertain."""
    def discard(self) -> None:
        """Removes the directory. Does nothing after ``publish``."""

def names_in_checksums(encoded: Buffer) -> list[str]:
    """The names of the files in a file of checksums. Raises Corrupt if it is damaged."""

def join_checksums(encoded: Buffer, more: Buffer) -> bytes:
    """Adds the checksums of files that are only in ``more`` to a file of checksums."""

class FileAssembly:
    """The assembly of a file from the parts of several ranks; see csrc/planning/object_files.h.

    Raises Corrupt if the encoded description is damaged.
    """
    def __init__(self, encoded: bytes) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    def ranges(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        """The bytes of streams that the bytes from ``begin`` to ``end`` of the file consist of:
        number of the stream, offset and size. The head of the file is in no stream.
        """
    @property
    def ranks(self) -> list[int]:
        """The ranks that send the streams."""
    def copy_head(self, begin: int, out: Buffer) -> None:
        """Copies the bytes of the head to ``out``, which has the file's bytes from ``begin`` on."""
    def copy(self, stream: int, offset: int, data: Buffer, begin: int, out: Buffer) -> None:
        """Copies bytes of a stream, from ``offset`` on, to their places in ``out``."""

host_chunk_bytes: int
device_chunk_bytes: int

def set_reserve(bytes: int, chunk_bytes: int) -> None:
    """Sets the target of the reserve, in chunks of ``chunk_bytes``; never lowers it."""

def grow_reserve(most_bytes: int, device: int, background: Background | None) -> int:
    """Allocates memory until the reserve has ``most_bytes`` or is complete. Returns its bytes.

    Several threads allocate: the threads of saves with this background, or the ordinary ones.
    For a CUDA device (-1: none) the memory is page-locked in arenas of 64 MiB. Raises OSError if
    memory runs out.
    """

def end_reserve() -> None:
    """Lowers the target of the reserve to its present size."""

def pool_bytes() -> int:
    """Bytes of host memory that the chunk pool keeps between saves."""

def reserve_bytes() -> int:
    """Target of the reserve in bytes."""

def reserved_bytes() -> int:
    """Bytes of the reserve that are allocated, including chunks that saves use."""

def trim_pool(bytes: int = 0) -> None:
    """Frees idle memory of the pool, including the reserve, until ``bytes`` bytes are left."""

def is_file_damage(error_number: int) -> bool:
    """True if an errno indicates a damaged file rather than a failing machine."""

class FaultKind:
    """Kinds of faults of a checkpoint."""

    DAMAGED: ClassVar[FaultKind]
    UNREAD: ClassVar[FaultKind]
    INCOMPLETE: ClassVar[FaultKind]

class CheckpointFault:
    """A fault that a verification has found; see csrc/engine/checkpoint_verification.h."""
    @property
    def kind(self) -> FaultKind: ...
    @property
    def name(self) -> str:
        """The tensor or object; empty: the file itself."""
    @property
    def file(self) -> str: ...
    @property
    def offset(self) -> int | None: ...
    @property
    def bytes(self) -> int: ...
    @property
    def what(self) -> str: ...

class CheckpointVerification:
    """Verifies a checkpoint: first ``add`` for each metadata file, then ``run``."""
    def __init__(self, directory: Directory | InStore) -> None: ...
    def add(self, index: CheckpointIndex) -> None:
        """Checks one metadata file and collects its records."""
    def run(self, options: ReadOptions, progress: Callable[[int], None] | None) -> None:
        """Reads and checks the records. Raises ValueError and OSError."""
    def names_file(self, name: str) -> bool:
        """True if the metadata names this file."""
    @property
    def records(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def faults(self) -> list[CheckpointFault]: ...
    @property
    def missing(self) -> list[tuple[str, list[str]]]:
        """Each file that does not exist, and the names stored in it."""
    @property
    def unverifiable(self) -> list[str]: ...

class FilePiece:
    """A piece of a file that the engine writes to a :class:`Store` (csrc/engine/store.h)."""
    @property
    def file_bytes(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def is_last(self) -> bool:
        """True if the piece is at the end of the file."""
    @property
    def is_cancelled(self) -> bool:
        """True if the save has failed or was cancelled. Then the call must end soon."""
    def buffer(self) -> memoryview:
        """The bytes. The engine uses the memory again when no buffer of the piece exists."""
    def wait(self, seconds: float) -> bool:
        """Waits until no buffer of the piece exists; False if ``seconds`` have passed first."""

class Store:
    """Files that are not in a local directory (csrc/engine/store.h).

    The engine calls methods of ``files`` from its threads. ``write(name, piece)`` returns when
    no buffer of the :class:`FilePiece` exists and, for the last piece, when the file is
    complete. ``size(name)`` returns the size of a file, and ``read(name, offset, bytes)``
    exactly that many bytes. ``files`` must not refer to the store.
    """
    def __init__(self, path: str, files: object) -> None: ...
    @property
    def path(self) -> str:
        """Path or URL, for messages."""

def crc32(data: Buffer, crc: int = 0) -> int:
    """Returns the same as ``zlib.crc32``, at memory speed. ``data`` is a contiguous buffer."""

def join_executor() -> None:
    """Ends the engine's threads after their queued work. For the exit of the interpreter."""

def seconds_without_gil() -> float:
    """Processor time in seconds that this thread spent in engine calls without the GIL."""
