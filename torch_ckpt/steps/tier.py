"""Steps that are saved to the hosts' own disks first, and copied to the root in the background.

1. A save writes to the disks (tier_target.py). It takes as long as a save to a local disk.
2. A copier copies the step to the root (tier_copy.py). From then on, the step is published.
3. Each host keeps its newest steps. It deletes no step that is not published.
4. With ``peers=1``, each host also keeps a copy of the files of another host.
5. A restore takes the newest step of the root and of the disks. A step on the disks counts if each
   of its files is on one of the hosts.
6. A rank reads a file from the disk of its host if the file is there, otherwise from another host
   (tier_peers.py), and otherwise from the root.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_ckpt._base.checks import require_at_least
from torch_ckpt._base.log import LOGGER
from torch_ckpt._base.system import absolute
from torch_ckpt.checkpoint.lineage import by_lineage
from torch_ckpt.checkpoint.source import Source
from torch_ckpt.errors import CheckpointError
from torch_ckpt.options import ReadOptions, WriteOptions
from torch_ckpt.ranks.group import TIMEOUT_SECONDS
from torch_ckpt.steps.host_step import PUBLISHED_NAME, HostStep, describe, drop
from torch_ckpt.steps.local import LocalSteps
from torch_ckpt.steps.local_copy import Holder, LocalCopy, SaveKey, SaveOnDisks, key_of
from torch_ckpt.steps.step_store import StepInfo, StepStore, info_of
from torch_ckpt.steps.tier_files import Files, PathFiles, TierSource, files_at
from torch_ckpt.steps.tier_peers import FileServer, PeerFiles
from torch_ckpt.steps.tier_target import TierTarget, make_private

if TYPE_CHECKING:
    from torch_ckpt.saving.target import Target
    from torch_ckpt.steps.lease_protocol import LeaseStore
    from torch_ckpt.steps.root_lease import ObservedLease, RootLease


@dataclass(frozen=True)
class LocalTier:
    """A directory on each host's own disk, to which a manager saves first.

    A save is committed when it is durable on the hosts' disks, and is then copied to the root in
    the background.

    Attributes:
        path: the directory, which may differ between hosts. Roots can share it. Only this user may
            have access to the directories in it.
        keep: number of the newest steps that each host keeps. A step that has not been copied to
            the root is kept as well.
        peers: number of other hosts that keep a copy of the files of each host.
        bytes_per_second: limit for the copies of each host; None: no limit.

    Raises:
        ValueError: an option has an invalid value.

    Example::

        tier = torch_ckpt.manager.LocalTier("/nvme/checkpoints", keep=2)
        manager = torch_ckpt.CheckpointManager("s3://bucket/run", interval=100, local=tier)
    """

    path: str | os.PathLike[str]
    keep: int = 2
    peers: int = 0
    bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        require_at_least("keep", self.keep, 1)
        require_at_least("peers", self.peers, 0)
        if self.bytes_per_second is not None and self.bytes_per_second <= 0:
            raise ValueError(f"bytes_per_second must be positive, got {self.bytes_per_second}")

    def directory_of(self, root: str) -> str:
        """Returns the directory of a root on this host."""
        digest = hashlib.blake2b(root.encode(errors="surrogatepass"), digest_size=8)
        return os.path.join(absolute(self.path), digest.hexdigest())


class Choice(NamedTuple):
    """A step on the disks that a restore may load.

    Attributes:
        digest: of the metadata, which identifies the save.
        holders: a rank whose host has the file, by file.
        is_in_root: True if the step is complete beneath the root, too.
    """

    digest: bytes
    holders: dict[str, Holder]
    is_in_root: bool


class TieredSteps(StepStore):
    """The steps beneath a root, with a tier on the hosts' own disks.

    Listing, retention, pins and the lease are those of the root.

    Args:
        root: the steps beneath the root.
        tier: the tier.

    Attributes:
        root_steps: the steps beneath the root.
        disk: the steps on the disk of this host.
    """

    def __init__(self, root: StepStore, tier: LocalTier) -> None:
        self.root_steps = root
        super().__init__(root.root, root._storage_options)
        self.tier = tier
        self.disk = LocalSteps(tier.directory_of(root.root))
        self.sweeps_what_lacks_markers = root.sweeps_what_lacks_markers
        # The times of the calls of forget(), by step number.
        self._forgotten: dict[int, float] = {}
        #: Held while a step is completed beneath the root, so that the copy of an older save does
        #: not replace a newer one.
        self.publishing = threading.Lock()
        #: The steps that are being saved straight to the root. Changed only with this lock.
        self.straight: set[int] = set()
        self._server: FileServer | None = None
        # The step that is loaded next, with its choice, and the addresses of the ranks' servers.
        self._chosen: tuple[int, Choice, Sequence[bytes]] | None = None
        self._rank, self._timeout = 0, TIMEOUT_SECONDS
        # The copies on this host that the restore has listed.
        self._listed: list[LocalCopy] = []
        #: Called on each rank when a step is saved on the hosts' disks.
        self.on_saved: Callable[[int, bytes], None] = lambda _step, _digest: None

    # --- the root --------------------------------------------------------------------------------

    @property
    def lease(self) -> RootLease | ObservedLease | None:
        return self.root_steps.lease

    @lease.setter
    def lease(self, lease: RootLease | ObservedLease | None) -> None:
        self.root_steps.lease = lease

    def lease_store(self) -> LeaseStore:
        return self.root_steps.lease_store()

    def require_root(self, *, read_only: bool) -> None:
        self.root_steps.require_root(read_only=read_only)

    def newest_epoch(self) -> int:
        return self.root_steps.newest_epoch()

    def entries(self, *, leftovers: bool = True) -> list[StepInfo]:
        return self.root_steps.entries(leftovers=leftovers)

    def delete(self, step: int) -> bool:
        # Not the disks: they may have a newer save of the step, which is not yet copied.
        return self.root_steps.delete(step)

    def forget(self, step: int) -> None:
        """Deletes all saves of a step that are older than this call from the disks of the hosts,
        with the next round of copies (tier_copy.py). Called on rank 0."""
        self._forgotten[step] = time.time()

    def is_forgotten(self, step: int, key: SaveKey) -> bool:
        """True if :meth:`forget` was called for the step since the save."""
        _epoch, saved_at, _run = key
        return saved_at < self._forgotten.get(step, 0.0)

    def contents(self, name: str) -> tuple[int, int]:
        return self.root_steps.contents(name)

    def is_complete(self, step: int) -> bool:
        return self.root_steps.is_complete(step)

    def marker_of(self, step: int) -> dict[str, Any] | None:
        return self.root_steps.marker_of(step)

    def is_pinned(self, step: int) -> bool:
        return self.root_steps.is_pinned(step)

    def path_of(self, step: int) -> str:
        return self.root_steps.path_of(step)

    def set_pinned(self, step: int, pinned: bool) -> None:
        self.root_steps.set_pinned(step, pinned)

    def _set_pinned(self, step: int, pinned: bool) -> None:
        raise AssertionError("set_pinned() calls the root")

    def sweep(self, *, deleted_only: bool = False, attempt: str = "") -> list[str]:
        # The copier may continue the copy in an unfinished directory.
        waits = any(not copy.is_published for copy in self.copies())
        return self.root_steps.sweep(deleted_only=deleted_only or waits, attempt=attempt)

    # --- saves and loads -------------------------------------------------------------------------

    def target(
        self,
        step: int,
        options: WriteOptions,
        *,
        attempt: str,
        may_replace: bool = False,
        marker: Callable[[], dict[str, Any]] = dict,
        make_room: Callable[[], None] = lambda: None,
    ) -> Target:
        of_root = partial(
            self.root_steps.target,
            step,
            options,
            attempt=attempt,
            may_replace=may_replace,
            marker=marker,
            make_room=make_room,
        )
        return TierTarget(
            self.disk,
            self.root_steps,
            of_root,
            step,
            options,
            attempt=attempt,
            may_replace=may_replace,
            marker=marker,
            copies=1 + self.tier.peers,
            publishing=self.publishing,
            straight=self.straight,
            on_saved=self.on_saved,
        )

    def _source_of(self, step: int, options: ReadOptions) -> Source:
        if self._chosen is None or self._chosen[0] != step:
            return self.root_steps._source_of(step, options)
        _step, choice, addresses = self._chosen
        at, path = self.disk.path_of(step), self.root_steps.path_of(step)
        options = self._with_storage(options)
        places: list[Callable[[], Files]] = []
        for own in self._listed:
            if (own.step, own.digest) == (step, choice.digest):
                if own.has_all:
                    return Source(at, options)
                places.append(partial(PathFiles, at, own.files))
        places.append(
            partial(
                PeerFiles,
                *(step, choice.digest, choice.holders, addresses, self._rank, self._timeout),
            )
        )
        if choice.is_in_root:
            places.append(partial(files_at, path, options))
        return TierSource(path, places, options)

    def copies(self, suspects: Collection[int] = ()) -> list[LocalCopy]:
        """Lists the steps on the disk of this host. Ignores a step that cannot be read.

        Args:
            suspects: the steps whose files are verified.
        """
        found = []
        for info in self.disk.entries(leftovers=False):
            try:
                verify = info.step in suspects
                found.append(describe(self.disk, info.step, verify=verify))
            except FileNotFoundError:
                pass  # another rank of this host has deleted the step
            except (OSError, ValueError, CheckpointError) as error:
                LOGGER.warning("%s is not used: %s", info.path, error)
        return found

    def serve(self, listed: list[LocalCopy], rank: int, timeout: float) -> bytes:
        """Serves the files on the disk of this host to other ranks, until :meth:`stop_serving`.

        Args:
            listed: the result of :meth:`copies`.

        Returns:
            The address; empty if this host has no steps.
        """
        self._listed, self._rank, self._timeout = listed, rank, timeout
        if not listed:
            return b""
        if self._server is None:
            self._server = FileServer(self.disk, timeout)
        return self._server.address

    def stop_serving(self) -> None:
        """Ends the server. No rank may be loading any more."""
        server, self._server, self._chosen = self._server, None, None
        if server is not None:
            server.close()

    def choose(self, step: int, choice: Choice | None, addresses: Sequence[bytes]) -> None:
        """Determines where the next load of a step reads its files.

        Args:
            choice: None: beneath the root.
            addresses: the results of :meth:`serve` on all ranks.
        """
        self._chosen = None if choice is None else (step, choice, addresses)

    def delete_old(self) -> None:
        """Deletes the steps on the disk of this host that the tier does not keep. Every rank of the
        host may call this method; a step that a process uses stays."""
        copies = self.copies()
        current, abandoned = by_lineage(copies)
        for copy in [*current[self.tier.keep :], *abandoned]:
            if copy.is_published:
                with suppress(OSError):
                    self.disk.delete(copy.step)

    def root_key(self, step: int) -> SaveKey | None:
        """Identifies the save of a step beneath the root; None if the step is not complete."""
        marker = self.root_steps.marker_of(step)
        if marker is None:
            return None
        return key_of_marker(marker)

    def note_published(self, step: int, digest: bytes) -> None:
        """Notes on the disk of this host that a save is complete beneath the root."""
        with suppress(FileNotFoundError), closing(HostStep(self.disk, step)) as found:
            if found.digest == digest:
                flags = os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
                os.close(os.open(PUBLISHED_NAME, flags, 0o600, dir_fd=found.directory.fd))

    def drop(self, step: int, digest: bytes) -> None:
        """Deletes a save from the disk of this host; see :func:`host_step.drop`."""
        drop(self.disk, step, digest)

    def prepare_disk(self) -> None:
        """Creates the directory of this host.

        Raises:
            CheckpointError, OSError: see :func:`make_private`.
        """
        make_private(self.disk.root)


def choose(
    of_root: Iterable[StepInfo], saves: Iterable[SaveOnDisks]
) -> tuple[list[LocalCopy | StepInfo], dict[int, Choice]]:
    """Combines the steps of the root with the steps on the disks of all ranks' hosts.

    Args:
        of_root: the steps beneath the root.
        saves: the saves on the disks, the oldest first.

    Returns:
        The steps that can be restored, and the choices for those on the disks, by step number.
    """
    in_root = {info.step: info for info in of_root if info.complete}
    newest: dict[int, LocalCopy | StepInfo] = dict(in_root)
    choices: dict[int, Choice] = {}
    for save in saves:
        step, info = save.step, in_root.get(save.step)
        is_in_root = info is not None and key_of(info) == save.key
        if not is_in_root:
            # A step that was published and is not there any more was deleted.
            if save.is_published or not save.is_complete:
                continue
            if step in newest and key_of(newest[step]) > save.key:
                continue
            newest[step] = save.one
        choices[step] = Choice(save.digest, save.holders, is_in_root)
    return list(newest.values()), choices


def key_of_marker(marker: dict[str, Any]) -> SaveKey:
    """Identifies the save of a step by the contents of the marker."""
    return key_of(info_of(0, "", marker, False, lambda: 0))
