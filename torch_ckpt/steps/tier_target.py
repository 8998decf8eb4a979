"""The target of a step on the hosts' own disks.

The ranks of a host write to one directory on its disk. Each host has a complete directory of the
step, except for the data files of the other hosts. The protocol:

1. Every rank opens the directory ``0000000100.tmp-{attempt}`` beneath its host's directory, and
   takes a shared lock. If the disk of one host has too little space, or already has the step, the
   coordinator opens the target of the root instead, and all ranks write there: the root replaces a
   step at once, and the disks of several hosts cannot.
2. The coordinator chooses a tag that no other save uses. So all files of the step can later be
   copied to one directory or store without new names. The first rank of each directory is its
   leader.
3. Every rank writes and fsyncs its files.
4. The coordinator encodes the metadata and the marker, and sends both to all ranks.
5. Each leader stores the metadata and the marker, and gives the directory its final name
   (csrc/directory/step.h). The step is saved when all leaders have done so.
6. If the save fails before that, each host deletes its directory. A host that dies in step 5 may
   leave other hosts with a complete directory. A restore does not use it, because the files of the
   dead host are missing.
"""

from __future__ import annotations

import errno
import os
import pickle
import stat
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch_ckpt import _C, _core
from torch_ckpt._base.formatting import size
from torch_ckpt._base.log import warn
from torch_ckpt._base.system import free_bytes
from torch_ckpt.checkpoint.directory import DirectoryIdentity, OpenDirectory, share_or_warn
from torch_ckpt.checkpoint.index import METADATA_NAME
from torch_ckpt.checkpoint.marker import MARKER_NAME, encoded_marker, step_name
from torch_ckpt.errors import CheckpointError
from torch_ckpt.options import WriteOptions
from torch_ckpt.saving.agreed_plan import AgreedPlan
from torch_ckpt.saving.save_state import SaveState
from torch_ckpt.saving.target import CheckpointTarget, Opened, Target, require_one_target
from torch_ckpt.saving.write import Written
from torch_ckpt.steps.host_step import drop
from torch_ckpt.steps.local import LocalSteps
from torch_ckpt.steps.local_copy import digest_of
from torch_ckpt.steps.step_store import StepStore, refuse_complete_step
from torch_ckpt.stores.folder import StreamFolder


class TierTarget(CheckpointTarget):
    """One step on the hosts' own disks; see the module's docstring.

    Args:
        disk: the steps on the disk of this host.
        root: the steps beneath the root.
        of_root: creates the target of the step beneath the root.
        step: step number.
        options: the options of the save.
        attempt, may_replace, marker: see :meth:`StepStore.target`.
        copies: number of hosts that keep each file.
        publishing: held while a step is completed beneath the root.
        straight: the steps that are being saved straight to the root.
        on_saved: called on each rank when the step is saved on all hosts' disks, with the step and
            the digest of the metadata.
    """

    def __init__(
        self,
        disk: LocalSteps,
        root: StepStore,
        of_root: Callable[[], Target],
        step: int,
        options: WriteOptions,
        *,
        attempt: str,
        may_replace: bool,
        marker: Callable[[], dict[str, Any]],
        copies: int,
        publishing: threading.Lock,
        straight: set[int],
        on_saved: Callable[[int, bytes], None],
    ) -> None:
        super().__init__(disk.path_of(step), options)
        self._on_saved = on_saved
        self._copies_of_file = copies
        self._publishing = publishing
        self._straight_steps = straight
        self._digest = b""
        self._disk = disk
        self._root = root
        self._of_root = of_root
        self._step = step
        self._unfinished = _core.unfinished_step_name(step_name(step), attempt)
        self._may_replace = may_replace
        self._marker = marker
        self._rank = self._ranks = 0
        self._is_leader = False
        self._directory: OpenDirectory | None = None
        self._straight: Target | None = None  # the target of the root, if a disk is full

    def open(self, rank: int, ranks: int) -> Opened:
        """Opens the directory on this host.

        Raises:
            FileExistsError: the step is complete, and must not be replaced.
            CheckpointError: the host's directory is not private.
        """
        self.discard()
        self._rank, self._ranks = rank, ranks
        if rank == 0 and not self._may_replace:
            for steps in (self._root, self._disk):
                if steps.is_complete(self._step):
                    refuse_complete_step(steps.path_of(self._step))
        make_private(self._disk.root)
        is_taken = self._disk.is_complete(self._step)
        if is_taken:
            # Without the lock, which would keep other steps from being deleted.
            self._directory = OpenDirectory(self._disk.root)
        else:
            path = os.path.join(self._disk.root, self._unfinished)
            _core.make_directories(path)
            self._directory = share_or_warn(OpenDirectory(path))
            # An earlier attempt of this run may have completed the step but not renamed it.
            self._directory.remove(MARKER_NAME)
        return Opened(
            DirectoryIdentity.of(self._directory),
            f"step {self._step} on the hosts' own disks",
            free=free_bytes(self._disk.root),
            is_taken=is_taken,
        )

    def lay_out(self, plan: AgreedPlan, opened: Sequence[Opened]) -> Sequence[bytes]:
        """Chooses the tag and the leaders, or opens the target of the root.

        Returns:
            For each rank: the tag, or None if the ranks save to the root; True if the rank is a
            leader; and its layout beneath the root.
        """
        require_one_target(opened)
        places = [(one.directory.mounts, one.directory.numbers) for one in opened]
        is_taken = any(one.is_taken for one in opened)
        self.is_on_hosts = not (is_taken or self._warn_if_full(plan, opened, places))
        if not self.is_on_hosts:
            with self.busy():
                with self._publishing:
                    self._straight_steps.add(self._step)
                self._straight = self._open_root()
                of_root = self._straight.open(0, len(opened))
                layouts = self._straight.lay_out(plan, [of_root] * len(opened))
            return [pickle.dumps((None, False, layout)) for layout in layouts]
        tag = f"{uuid.uuid4().hex[:8]}_"
        return [
            pickle.dumps((tag, places.index(place) == rank, b""))
            for rank, place in enumerate(places)
        ]

    def _warn_if_full(
        self, plan: AgreedPlan, opened: Sequence[Opened], places: list[tuple[Any, Any]]
    ) -> bool:
        """Returns True if the disk of a host has too little space for the files of this host, and
        of the hosts before it (tier_sharing.py)."""
        of_hosts = dict.fromkeys(places, 0)
        for place, count in zip(places, plan.coordinator.bytes_by_rank(), strict=True):
            of_hosts[place] += count
        hosts = [*of_hosts]
        for rank, (one, place) in enumerate(zip(opened, places, strict=True)):
            number = hosts.index(place)
            first = number + 1 - min(self._copies_of_file, len(hosts))
            needed = sum(of_hosts[hosts[other]] for other in range(first, number + 1))
            if one.free is not None and one.free < needed:
                warn(
                    f"{self.path}: the host of rank {rank} needs {size(needed)} for step "
                    f"{self._step}, but only {size(one.free)} are free. All ranks save this step "
                    "to the root"
                )
                return True
        return False

    def files(
        self, state: SaveState, items: bytes, layout: bytes
    ) -> tuple[OpenDirectory | StreamFolder, str, _C.SaveSources]:
        tag, self._is_leader, of_root = pickle.loads(layout)
        if tag is None:
            with self.busy():
                if self._straight is None:
                    self._straight = self._open_root()
                    self._straight.open(self._rank, self._ranks)
                return self._straight.files(state, items, of_root)
        assert self._directory is not None
        sources = state.sources(items, bool(self.options.separation_hint))
        return self._directory, f"__{self._rank}_{tag}", sources

    def _open_root(self) -> Target:
        target = self._of_root()
        target.timeout, target.expected_bytes = self.timeout, self.expected_bytes
        self.path = target.path
        return target

    def undo(self, written: Written) -> None:
        if self._straight is not None:
            self._straight.undo(written)

    def commit(self, plan: AgreedPlan, written: list[Written]) -> bytes:
        if self._straight is not None:
            with self.busy(), self._publishing:
                return self._straight.commit(plan, written)
        data = plan.encode(written, self.storage_meta())
        marker = {"step": self._step, "saved_at": time.time(), **self._marker()}
        return pickle.dumps((bytes(data), encoded_marker(marker)))

    def seal_of(self, answer: bytes) -> bytes:
        data, _marker = pickle.loads(answer)
        return _core.EncodedMetadata(data).seal

    def publish_on_host(self, answer: bytes) -> None:
        assert self._directory is not None
        data, marker = pickle.loads(answer)
        self._digest = digest_of(data)
        if not self._is_leader:
            return
        with self.busy():
            _core.publish_contents(self._directory, METADATA_NAME, data)
            step = _core.StepSave(self._disk.protocol, self._directory, step_name(self._step))
            step.publish(marker, replace=True, sync=self.options.sync_files)
            if step.replaced:  # a directory without a marker
                with suppress(OSError):
                    self._disk.protocol.remove(step.replaced)

    def discard(self) -> None:
        straight, self._straight = self._straight, None
        directory, self._directory = self._directory, None
        if straight is not None:
            straight.discard()
            with self._publishing:
                self._straight_steps.discard(self._step)
        if directory is None:
            return
        directory.close()
        if self.is_completed:
            self._on_saved(self._step, self._digest)
            return
        # A failed save: the ranks of a host try this one after the other, and the last succeeds.
        with suppress(OSError, CheckpointError):
            if self._digest:
                drop(self._disk, self._step, self._digest)
            self._disk.protocol.remove(self._unfinished)


def make_private(path: str) -> None:
    """Creates a directory that only this user can read.

    Raises:
        CheckpointError: there is a link, or a directory of another user or that others can write.
        OSError: the directory cannot be created.
    """
    with suppress(FileExistsError):
        _core.make_directories(os.path.dirname(path))
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "the local tier needs a directory here", path)
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise CheckpointError(
            f"{path}: this directory belongs to another user, or other users can use it. Choose "
            "another path for LocalTier, or remove the directory"
        )
