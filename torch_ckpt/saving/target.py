"""Targets of saves: where the files of a save go, and what makes them visible.

A save calls a target in this order (saving/run.py):

1. :meth:`Target.open`, on all ranks. The results are compared on the coordinator.
2. :meth:`Target.lay_out`, on the coordinator. Every rank gets its part of the layout.
3. :meth:`Target.files`, on all ranks. The engine then writes the files.
4. :meth:`Target.written`, on all ranks, when the engine has written the files; :meth:`Target.stop`
   if this rank has failed, and :meth:`Target.undo` if another rank has.
5. :meth:`Target.commit`, on the coordinator, when the files of all ranks are durable.
6. If :attr:`Target.is_on_hosts` on the coordinator, :meth:`Target.publish_on_host`, on all ranks,
   with the result of step 5.
7. :meth:`Target.discard`, on all ranks, at the end of each save. Before the commit, the
   coordinator's call removes the files of all ranks.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from torch.distributed.checkpoint.metadata import StorageMeta

from torch_ckpt import _C, _core
from torch_ckpt._base.checks import require_instance
from torch_ckpt._base.system import absolute
from torch_ckpt.checkpoint.directory import DirectoryIdentity, OpenDirectory, require_one_directory
from torch_ckpt.checkpoint.lease import DirectoryLease, refuse_hidden_save, remove_own
from torch_ckpt.checkpoint.shared_directory import Probe
from torch_ckpt.errors import CheckpointError
from torch_ckpt.options import DEFAULT_READ_OPTIONS, ReadOptions, WriteOptions
from torch_ckpt.ranks.group import TIMEOUT_SECONDS
from torch_ckpt.saving.agreed_plan import AgreedPlan
from torch_ckpt.saving.save_state import SaveState
from torch_ckpt.saving.write import Written
from torch_ckpt.stores.folder import ObjectFolder, StreamFolder


class Opened(NamedTuple):
    """Description of a target that a rank has opened, for the coordinator.

    Attributes:
        directory: identity of the directory.
        save: a description of the save that must be equal on all ranks; empty if there is nothing
            to compare.
        memory: address of memory that the ranks of this machine can use for the save; empty if this
            rank offers none.
        address: address at which other ranks can send parts of files to this rank; empty if the
            rank offers none.
        free: number of free bytes, if the save may go elsewhere; None if it may not, or if the
            number is unknown.
        is_taken: True if the directory cannot have this save.
    """

    directory: DirectoryIdentity
    save: str = ""
    memory: bytes = b""
    address: bytes = b""
    free: int | None = None
    is_taken: bool = False


class Target:
    """The target of one save on this rank; see the module's docstring.

    Args:
        path: path or URL of the checkpoint, when it is committed.
        options: the options of the save.
    """

    #: True if each save to such a target can be compared with the previous one.
    finds_unchanged = True
    #: True if the save is visible only when all ranks have completed it. Read on the coordinator
    #: after :meth:`lay_out`.
    is_on_hosts = False

    def __init__(self, path: str | os.PathLike[str], options: WriteOptions) -> None:
        require_instance("options", options, WriteOptions)
        self.path = os.fspath(path)
        self.options = options
        #: For reads of the checkpoint that was saved.
        self.read_options = DEFAULT_READ_OPTIONS
        if options.storage_options is not None:
            self.read_options = ReadOptions(storage_options=options.storage_options)
        #: The options with which the engine writes the files of :meth:`files`.
        self.engine_options = options
        #: Seconds without a heartbeat after which another rank is declared dead.
        self.timeout = TIMEOUT_SECONDS
        #: Lower bound on the bytes that all ranks write; set on each rank before :meth:`open`.
        self.expected_bytes = 0
        #: True while the target does work that may take long but moves no bytes.
        self.is_busy = False
        #: Number of bytes that the target itself has moved.
        self.bytes_moved = 0
        #: True once all ranks have completed the save.
        self.is_completed = False

    def select(self, state: SaveState) -> None:
        """Removes the values that the target does not store."""

    def open(self, rank: int, ranks: int) -> Opened:
        """Opens the target, on every rank. The coordinator creates it."""
        raise NotImplementedError

    def lay_out(self, plan: AgreedPlan, opened: Sequence[Opened]) -> Sequence[bytes]:
        """Chooses the files of each rank, on the coordinator.

        Args:
            opened: the result of :meth:`open` on each rank.

        Returns:
            The layout for each rank.

        Raises:
            CheckpointError, NotCommitted: ranks have opened targets of different saves.
        """
        raise NotImplementedError

    def files(
        self, state: SaveState, items: bytes, layout: bytes
    ) -> tuple[OpenDirectory | StreamFolder, str, _C.SaveSources]:
        """Returns the directory or objects that this rank writes, the prefix of its file names, and
        the values to write.

        Args:
            items: the items that the plan assigns to this rank.
            layout: this rank's part of :meth:`lay_out`.
        """
        raise NotImplementedError

    def written(self) -> None:
        """Completes the files of this rank, when the engine has written its values."""

    def stop(self) -> None:
        """Ends the write after an error on this rank, so that no other rank waits for it."""

    def undo(self, written: Written) -> None:
        """Removes the files that this rank has written, after another rank has failed."""

    def commit(self, plan: AgreedPlan, written: list[Written]) -> bytes:
        """Makes the save visible, on the coordinator.

        Args:
            written: the results of the writes, indexed by rank.

        Returns:
            The seal of the metadata; empty if there is no metadata. If :attr:`is_on_hosts`, the
            argument of :meth:`publish_on_host`.

        Raises:
            NotCommitted: nothing is visible, and the files have been removed.
            DurabilityUncertain: the save may be visible, but a power cut could lose it.
        """
        raise NotImplementedError

    def seal_of(self, answer: bytes) -> bytes:
        """Returns the seal of the metadata from the result of :meth:`commit`."""
        raise NotImplementedError

    def publish_on_host(self, answer: bytes) -> None:
        """Makes the save visible on this rank's host.

        Args:
            answer: the result of :meth:`commit`.
        """
        raise NotImplementedError

    def discard(self) -> None:
        """Ends the save. Unless it is committed, removes its files. May be called repeatedly."""

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Block with work that may take long but moves no bytes."""
        self.is_busy = True
        try:
            yield
        finally:
            self.is_busy = False


class CheckpointTarget(Target):
    """A checkpoint: data files, and the metadata that commits them."""

    def commit(self, plan: AgreedPlan, written: list[Written]) -> bytes:
        data = plan.encode(written, self.storage_meta())
        self.publish(data, {name for of_rank in written for name in of_rank.files.names})
        return data.seal

    def open_for_copy(self, layout: bytes) -> OpenDirectory | ObjectFolder:
        """Returns the directory or objects to which this rank copies files that another save has
        written, instead of :meth:`files`.

        Args:
            layout: this rank's part of :meth:`lay_out`.
        """
        raise NotImplementedError

    def keep_all(self) -> None:
        """Makes the end of this save delete nothing."""
        raise NotImplementedError

    def storage_meta(self) -> StorageMeta:
        """Returns the description of the storage that the metadata contains."""
        return StorageMeta(checkpoint_id=self.path, save_id=str(uuid.uuid4()))

    def publish(self, data: _core.EncodedMetadata, files: Collection[str]) -> None:
        """Publishes the metadata, then removes the files that the metadata does not name.

        Args:
            data: the contents of ``.metadata``.
            files: names of the data files that the metadata names, relative to the checkpoint.

        Raises:
            NotCommitted, DurabilityUncertain: see :meth:`commit`.
        """
        raise NotImplementedError


class DirectoryTarget(CheckpointTarget):
    """A checkpoint directory. csrc/directory/lease.h describes the commit.

    A relative path is resolved against the current working directory when the target is created.
    Each save opens the directory once, at its start, and writes only to the opened directory.

    Args:
        own_rank: the rank, if it saves independently of other ranks and has its own metadata; None
            if the ranks save together.
        ends_earlier: see :class:`DirectoryLease`; for the lease that :meth:`open` takes.

    Attributes:
        directory_path: path of the directory that is written; the directory may get another name at
            the commit.
        lease: the lease on the directory, if this rank has one.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        options: WriteOptions,
        own_rank: int | None = None,
        ends_earlier: bool = True,
    ) -> None:
        super().__init__(absolute(path), options)
        self.directory_path = self.path
        self.lease: DirectoryLease | None = None
        self._own_rank = own_rank
        self._ends_earlier = ends_earlier
        self._rank = 0
        self._directory: OpenDirectory | None = None
        self._probe: Probe | None = None  # on the coordinator

    @property
    def directory(self) -> OpenDirectory:
        """The directory that the save has opened. If no save has begun, opens the directory by its
        path."""
        if self._directory is None:
            self._directory = OpenDirectory(self.directory_path)
        return self._directory

    def open(self, rank: int, ranks: int) -> Opened:
        """Opens the directory, which is created if it does not exist. Rank 0 takes a lease on it.

        Raises:
            FileExistsError, RuntimeError: the directory has a checkpoint that this save must not
                replace.
        """
        self.discard()
        self._rank = rank
        _core.make_directories(self.directory_path)
        refuse_hidden_save(self.directory, self._own_rank)
        metadata = _core.metadata_name(self._own_rank)
        if not self.options.overwrite and metadata in self.directory.names():
            raise RuntimeError(
                f"Checkpoint already exists in {self.path}; pass overwrite=True, in WriteOptions "
                "or to FileSystemWriter, to replace it"
            )
        if rank == 0:
            self.take_lease(self._ends_earlier)
        return Opened(DirectoryIdentity.of(self.directory))

    @property
    def tag(self) -> str | None:
        """The part of the names of this save's files that no other save uses, if this rank has a
        lease."""
        return None if self.lease is None else self.lease.tag

    def take_lease(self, ends_earlier: bool = True) -> None:
        """Takes a lease on the directory; see :class:`DirectoryLease`."""
        self.lease = DirectoryLease(self.directory, self._own_rank, ends_earlier)

    def lay_out(self, plan: AgreedPlan, opened: Sequence[Opened]) -> Sequence[bytes]:
        may_differ = require_one_target(opened)
        assert self.lease is not None
        probe = self.leave_probe() if may_differ else b""
        return [b"%b\0%b" % (self.lease.tag.encode(), probe)] * len(opened)

    def leave_probe(self) -> bytes:
        """Creates a probe, on the coordinator, because ranks may have different mounts.

        Returns:
            The encoded probe, for :meth:`require_probe`.
        """
        self._probe = Probe.create(self.directory)
        return self._probe.encode()

    def require_probe(self, probe: bytes, rank: int | None) -> None:
        """Checks that a rank sees the probe of the coordinator.

        Raises:
            CheckpointError: the hosts have different directories at the path.
        """
        with self.busy():
            Probe.decode(probe).require(self.directory, rank)

    def files(
        self, state: SaveState, items: bytes, layout: bytes
    ) -> tuple[OpenDirectory, str, _C.SaveSources]:
        tag, probe = layout.split(b"\0", 1)
        if probe:
            self.require_probe(probe, self._rank)
        sources = state.sources(items, bool(self.options.separation_hint))
        prefix = f"__{self._rank}_{tag.decode()}"
        return self.directory, _core.choose_prefix(self.directory, prefix), sources

    def keep_all(self) -> None:
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.hand_over()

    def open_for_copy(self, layout: bytes) -> OpenDirectory:
        _tag, probe = layout.split(b"\0", 1)
        if probe:
            self.require_probe(probe, self._rank)
        return self.directory

    def undo(self, written: Written) -> None:
        remove_own(self.directory, set(written.files.names))

    def publish(self, data: _core.EncodedMetadata, files: Collection[str]) -> None:
        """Publishes the metadata, then removes the files that the metadata does not name.

        Args:
            data: the contents of ``.metadata``.
            files: names of the data files that the metadata names, relative to the directory.

        Raises:
            NotCommitted: nothing was published. The previous contents of the directory are intact,
                and the new data files that this process can see were removed. If the path has been
                made to refer to another directory since the save began, that other directory was
                not changed.
            DurabilityUncertain: the checkpoint might be visible already, but a power cut could lose
                the checkpoint.
        """
        if self._probe is not None:
            self._remove_probe(self._probe)
        lease, self.lease = self.lease, None
        assert lease is not None
        lease.commit(data, files, sync=self.options.sync_files, replace=self.options.overwrite)

    def discard(self) -> None:
        if self._probe is not None:
            self._remove_probe(self._probe)
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.discard()  # removes the files of all ranks
        self._directory = None

    def _remove_probe(self, probe: Probe) -> None:
        self._probe = None
        # A later save removes the probe, too.
        with suppress(OSError):
            self.directory.remove(probe.name)


def require_one_target(opened: Sequence[Opened]) -> bool:
    """Raises CheckpointError or NotCommitted if ranks have opened targets of different saves.

    Returns: see :func:`require_one_directory`.
    """
    if len({one.save for one in opened}) > 1:
        of_ranks = ", ".join(f"rank {rank}: {one.save}" for rank, one in enumerate(opened))
        raise CheckpointError(
            f"ranks save different checkpoints ({of_ranks}): every rank must make the same saves, "
            "in the same order"
        )
    return require_one_directory([one.directory for one in opened])
