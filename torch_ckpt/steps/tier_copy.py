"""Copies steps from the hosts' own disks to the root, in the background.

Every rank has a thread. The threads of all ranks make the same rounds. Each round derives its work
from the disks and the root, so that a round after a failure or a restart continues. One
round:

1. Every rank reports the steps on the disk of its host, and how often it was notified. The
   coordinator compares these steps with the root, and names the saves that the root has now, and
   the saves to delete: another save has replaced them, or the step was deleted.
2. Each host notes which saves are published, and deletes steps that it need not keep.
3. If each host keeps files of other hosts, the coordinator chooses the newest save that is complete
   on the hosts, is not published, and of which a host lacks such files. Ranks copy them to their
   disks (tier_sharing.py), and the round ends. So files are usually on several disks before a copy
   to the root, which takes longer, begins. If a rank fails, it logs a warning. After such a
   failure, or after _MOST_SHARED such rounds, a copy to the root is next, so that steps reach the
   root even if hosts cannot copy files, or copy no faster than training saves.
4. Otherwise, the coordinator chooses the oldest save that is complete on the hosts, is not
   published, and is newer than the root's step of this number. Every rank opens the target beneath
   the root. The coordinator assigns each file to one of the ranks whose hosts have it.
5. Every rank verifies its files and copies them. A file in a directory is copied under a temporary
   name, fsynced and renamed, so a file with its final name is complete, and is not copied again
   after a restart. The attempt in the name of the unfinished directory is the begin of the digest,
   so that a restart finds the directory. The coordinator stores the same metadata, and completes
   the step (step.h, object_step.py).

The ranks make rounds until there is nothing to do, and again when they are notified. If a round
fails, all ranks pause and make another one. A save of which a host has a damaged file is not
copied.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, suppress
from functools import partial
from typing import Any, ClassVar, NamedTuple

from torch.distributed.checkpoint.api import CheckpointException

from torch_ckpt import _core
from torch_ckpt._base.life_cycle import LiveObjects, Part, register
from torch_ckpt._base.log import LOGGER
from torch_ckpt.checkpoint.directory import DirectoryIdentity, OpenDirectory, share_or_warn
from torch_ckpt.checkpoint.index import METADATA_NAME, decode_index
from torch_ckpt.checkpoint.marker import parsed_marker
from torch_ckpt.errors import CheckpointError, Corrupt
from torch_ckpt.ranks.exchange import Answers, Exchange
from torch_ckpt.ranks.failures import causes, failure_of
from torch_ckpt.ranks.group import RankGroup
from torch_ckpt.saving.target import CheckpointTarget, Opened
from torch_ckpt.steps.host_step import HostStep
from torch_ckpt.steps.local_copy import (
    Holder,
    LocalCopy,
    SaveOnDisks,
    assign_files,
    saves_on_disks,
)
from torch_ckpt.steps.tier import TieredSteps, key_of_marker
from torch_ckpt.steps.tier_files import DirectoryFiles, Files, first_fault
from torch_ckpt.steps.tier_peers import FileServer, PeerFiles
from torch_ckpt.steps.tier_sharing import (
    Pieces,
    Progress,
    Sharing,
    assign_to_hosts,
    copy_to_directory,
)
from torch_ckpt.stores import ObjectStore
from torch_ckpt.stores.folder import ObjectFolder

_PIECE_BYTES = 16 << 20

# Largest number of saves that are copied to other hosts between two copies to the root.
_MOST_SHARED = 4

# Seconds between two rounds after a failure.
_PAUSE_SECONDS = 60.0

#: Seconds for which the exit of a program waits for copies, and for which a copy takes to end.
EXIT_SECONDS, _END_SECONDS = 60.0, 10.0

# A step and the digest of its metadata.
SaveId = tuple[int, bytes]


class _Message(NamedTuple):
    """The message of a rank at the begin of a round.

    Attributes:
        notified: how often the rank was notified.
        copies: the steps on the disk of its host.
        host: identifies the disk.
        address: the address at which the rank serves files; empty if it does not.
    """

    notified: int
    copies: list[LocalCopy]
    host: tuple[object, ...]
    address: bytes


class _Plan(NamedTuple):
    """The coordinator's answer.

    Attributes:
        seen: how often every rank was notified.
        noted: the saves that the root has now, or had, and that all hosts have noted.
        published: the other saves that the root has now, or had.
        fresh: the saves in ``published`` that no host has noted.
        unwanted: the saves to delete from the disks.
        save: the save to copy to the root; None if there is none.
        shared: the save of which hosts copy files of other hosts; None if there is none.
        from_others: for each rank, the files to copy, and the ranks that serve them.
        hosts, addresses: of the messages of all ranks.
    """

    seen: int
    noted: list[SaveId]
    published: list[SaveId]
    fresh: list[SaveId]
    unwanted: list[SaveId]
    save: SaveId | None
    shared: SaveId | None
    from_others: list[dict[str, Holder]]
    hosts: list[tuple[object, ...]]
    addresses: list[bytes]


class _Offer(NamedTuple):
    """The message of a rank before a copy.

    Attributes:
        files: sizes of the data files that its host has; None if the host does not have the save.
        of_all: number of data files on all hosts together.
    """

    files: dict[str, int] | None
    of_all: int


class _Task(NamedTuple):
    """The part of a copy that one rank does.

    Attributes:
        files: names of the files to copy.
        sends: True if the rank sends the metadata and the marker.
    """

    files: list[str]
    sends: bool


class Copier:
    """Copies steps to the root, in the background. All ranks make the same calls in the same order.

    Args:
        steps: the steps of the root and of the disks.
        group: the ranks; used by this object only.
        target: creates the target of a step beneath the root, from the step, the attempt, and a
            function that returns the contents of the marker.
        timeout: seconds without a heartbeat after which a rank is declared dead.
        on_published: called on rank 0, once for each save that the root has now, with the step.
    """

    # The copiers of this process that have a thread.
    _running: ClassVar[LiveObjects[Copier]] = LiveObjects()

    def __init__(
        self,
        steps: TieredSteps,
        group: RankGroup,
        target: Callable[[int, str, Callable[[], dict[str, Any]]], CheckpointTarget],
        timeout: float,
        on_published: Callable[[int], None],
    ) -> None:
        self.steps = steps
        self.timeout = timeout
        self.target = target
        self._group = group
        self._pid = os.getpid()
        self._on_published = on_published
        self._changed = threading.Condition()
        self._exchange: Exchange | None = None
        self._copy: _Copy | Sharing | None = None
        self._server: FileServer | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False
        # How often this rank was notified; how often every rank was, before the last round that
        # found nothing to copy; and the failed rounds.
        self._notified = self._seen = self._failures = 0
        # The saves of this process that are not known to be published.
        self._own: set[SaveId] = set()
        # On the coordinator: the saves that were reported, and those that cannot be copied to the
        # root.
        self._reported: set[SaveId] = set()
        self._damaged: set[SaveId] = set()
        # On the coordinator: number of copies to other hosts before the next copy to the root.
        self._left_to_share = _MOST_SHARED

    def notify(self, save: SaveId | None = None) -> None:
        """Makes a round.

        Args:
            save: a save of this process, for which :meth:`wait` waits.
        """
        with self._changed:
            self._notified += 1
            if save is not None:
                self._own.add(save)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="torch_ckpt copies", daemon=True)
                thread.start()
                self._thread = thread
                self._running.add(self)
            self._changed.notify_all()

    def unpublished(self) -> list[int]:
        """Returns the steps of this process that are not known to be published."""
        with self._changed:
            return sorted(step for step, _digest in self._own)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the saves of this process are published, or a round has failed. Does not wait
        in a callback of a copy, nor in a forked child, which has no thread.

        Returns:
            True if they are published.
        """
        if os.getpid() != self._pid:
            return not self._own
        with self._changed:
            notified, failures = self._notified, self._failures
            if threading.current_thread() is not self._thread:
                self._changed.wait_for(
                    lambda: self._seen >= notified or self._failures > failures or self._is_closed,
                    timeout,
                )
            return not self._own

    def close(self, timeout: float | None) -> None:
        """Waits for the copies, at most for ``timeout`` seconds, and ends the thread. Logs the
        steps that are not published."""
        self.wait(timeout)
        was_closed = self._is_closed
        self.end()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_END_SECONDS)
            if not thread.is_alive():
                self._running.discard(self)
        if self._own and not was_closed:
            LOGGER.warning(
                "%s: steps %s are on the hosts' own disks, but not beneath the root. The next run "
                "on these hosts copies them",
                self.steps.disk.root,
                self.unpublished(),
            )

    def end(self) -> None:
        """Ends the thread, without waiting for it."""
        with self._changed:
            self._is_closed = True
            exchange, copy = self._exchange, self._copy
            self._changed.notify_all()
        if exchange is not None:
            exchange.cancel(failure_of(CheckpointError("the program has ended")))
        if copy is not None:
            copy.stop()

    @classmethod
    def end_all(cls) -> None:
        """Ends all copiers, when the interpreter exits. A thread that uses the store later would
        crash the process."""
        for copier in cls._running:
            copier.close(EXIT_SECONDS)

    @classmethod
    def forget_in_child(cls) -> None:
        """Drops the copiers of the parent."""
        cls._running = LiveObjects()

    def pause(self, seconds: float) -> None:
        """Waits, in the copier's thread.

        Raises:
            CheckpointError: the copier is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, seconds)
            if self._is_closed:
                raise CheckpointError("the program has ended")

    # --- private, in the copier's thread ---------------------------------------------------------

    def _run(self) -> None:
        has_failed = False
        while True:
            with self._changed:
                # All ranks agree on what they have seen, so they make the same rounds.
                begun_with = self._notified if has_failed else self._seen
                seconds = min(self.timeout / 4, _PAUSE_SECONDS) if has_failed else None
                self._wait_for_notification(begun_with, seconds)
                if self._is_closed:
                    return
            try:
                plan = self._make_round()
                has_failed = False
            except (Exception, CheckpointException) as error:  # torch's error is no Exception
                # The next round leaves out a damaged save.
                has_failed = not _is_corrupt(error)
                with self._changed:
                    self._failures += has_failed
                    self._changed.notify_all()
                    if not self._is_closed:
                        LOGGER.warning("steps could not be copied: %s", causes(error))
                continue
            with self._changed:
                self._own -= {*plan.noted, *plan.published, *plan.unwanted}
                if plan.save is None and plan.shared is None:
                    self._seen = plan.seen
                self._changed.notify_all()

    def _wait_for_notification(self, number: int, seconds: float | None) -> None:
        """Waits until there were more than ``number`` notifications."""
        self._changed.wait_for(lambda: self._is_closed or self._notified > number, seconds)

    def _make_round(self) -> _Plan:
        # Nothing may fail before, because the other ranks wait for this one.
        exchange = Exchange.open(self._group, "publish", self.timeout)
        with self._changed:
            self._exchange = exchange
            if self._is_closed:
                exchange.cancel(failure_of(CheckpointError("the program has ended")))
        try:
            with exchange, exchange.alive(self._moved):
                plan, _ = exchange.exchange("list", self._list, self._choose)
                exchange.run("note", lambda: self._note(plan, exchange.is_coordinator))
                if plan.shared is not None:
                    self._share(plan, plan.shared, exchange)
                elif plan.save is not None:
                    self._make_copy(plan, plan.save, exchange)
        finally:
            self._exchange = None
            server, self._server = self._server, None
            if server is not None:
                server.close()
        return plan

    def _moved(self) -> int:
        """Returns a number that changes while this rank makes progress."""
        copy = self._copy  # the copier's thread may set the attribute to None
        return time.monotonic_ns() if copy is None else copy.moved()

    def _list(self) -> tuple[_Message, None]:
        with self._changed:
            notified = self._notified
        copies, disk = self.steps.copies(), self.steps.disk
        host: tuple[object, ...] = ()
        if copies:
            with closing(OpenDirectory(disk.root)) as directory:
                identity = DirectoryIdentity.of(directory)
            host = identity.mounts, identity.numbers
        # Without copies, no rank needs files of this host.
        if copies and self.steps.tier.peers:
            self._server = FileServer(disk, self.timeout)
        address = b"" if self._server is None else self._server.address
        return _Message(notified, copies, host, address), None

    def _choose(self, messages: list[_Message]) -> _Plan:
        noted: list[SaveId] = []
        published: list[SaveId] = []
        fresh: list[SaveId] = []
        unwanted: list[SaveId] = []
        complete: list[SaveOnDisks] = []  # and not published
        for save in saves_on_disks([message.copies for message in messages]):
            key = save.step, save.digest
            if self.steps.is_forgotten(save.step, save.key):
                unwanted.append(key)
                continue
            if save.is_published:
                (noted if save.is_noted else published).append(key)
                continue
            in_root = self.steps.root_key(save.step)
            if in_root == save.key:
                published.append(key)
                fresh.append(key)
            elif save.step in self.steps.straight:
                continue
            elif in_root is not None and save.key < in_root and math.isfinite(in_root[0]):
                unwanted.append(key)
            elif (
                save.is_complete
                and key not in self._damaged
                and (in_root is None or math.isfinite(in_root[0]))
            ):
                # Not if a user has made the step in the root, or if its marker cannot be read.
                complete.append(save)
        hosts = [message.host for message in messages]
        shared, from_others = self._choose_shared(complete, hosts)
        return _Plan(
            min(message.notified for message in messages),
            noted,
            published,
            fresh,
            unwanted,
            (complete[0].step, complete[0].digest) if complete and shared is None else None,
            shared,
            from_others,
            hosts,
            [message.address for message in messages],
        )

    def _choose_shared(
        self, saves: Sequence[SaveOnDisks], hosts: Sequence[tuple[object, ...]]
    ) -> tuple[SaveId | None, list[dict[str, Holder]]]:
        """Chooses the newest save of which a host lacks files of other hosts, unless it is the turn
        of a copy to the root."""
        for save in reversed(saves if self._left_to_share > 0 else []):
            from_others = assign_to_hosts(save.files, hosts, self.steps.tier.peers)
            if any(from_others):
                return (save.step, save.digest), from_others
        return None, [{} for _ in hosts]

    def _note(self, plan: _Plan, is_coordinator: bool) -> None:
        """Updates the disk of this host. An error is logged: the next round tries again."""
        for function, saves in (
            (self.steps.note_published, plan.published),
            (self.steps.drop, plan.unwanted),
        ):
            for save in saves:
                try:
                    function(*save)
                except (OSError, CheckpointError) as error:
                    LOGGER.warning("step %d on the disk of this host: %s", save[0], error)
        if is_coordinator:
            for save in plan.fresh:
                if save not in self._reported:
                    self._reported.add(save)
                    self._on_published(save[0])
        self.steps.delete_old()

    def _share(self, plan: _Plan, save: SaveId, exchange: Exchange) -> None:
        wanted = plan.from_others[exchange.rank]
        peers = PeerFiles(*save, wanted, plan.addresses, exchange.rank, self.timeout)
        pieces = self._pieces_on(plan, exchange.rank)
        sharing = Sharing(self.steps.disk, save, [*wanted], peers, pieces)
        with self._changed:
            self._copy = sharing
        try:
            has_copied, _ = exchange.exchange("share", lambda: (sharing.run(), None), all)
            self._left_to_share = self._left_to_share - 1 if has_copied else 0
        finally:
            with self._changed:
                self._copy = None
            peers.close()

    def _make_copy(self, plan: _Plan, save: SaveId, exchange: Exchange) -> None:
        self._left_to_share = _MOST_SHARED
        copy = _Copy(self, *save, self._pieces_on(plan, exchange.rank))
        with self._changed:
            self._copy = copy
        try:
            (task, layout), _ = exchange.exchange(
                "offer",
                lambda: (copy.offer(exchange.rank, exchange.size), None),
                lambda offers: _assign(offers, copy),
            )
            # With a function that undoes, a coordinator that was declared dead does not commit.
            exchange.exchange(
                "copy",
                lambda: (copy.copy(task, layout), None),
                copy.complete,
                lambda _none: None,
            )
        except CheckpointException as error:
            if _is_corrupt(error):
                self._damaged.add(save)
            raise
        finally:
            with self._changed:
                self._copy = None
            copy.close()

    def _pieces_on(self, plan: _Plan, rank: int) -> Pieces:
        """Returns the function that reads files in pieces. The ranks of a host share the limit."""
        return partial(self._pieces, 1.0 / plan.hosts.count(plan.hosts[rank]))

    def _pieces(
        self,
        share: float,
        files: Files,
        name: str,
        busy: Callable[[], AbstractContextManager[None]],
    ) -> Iterator[memoryview]:
        """Yields a file in pieces, as fast as the limit permits.

        Args:
            share: part of the limit.
            busy: block in which the function waits.
        """
        begun, offset, count = time.monotonic(), 0, files.size(name)
        limit = self.steps.tier.bytes_per_second
        while offset < count:
            self.pause(0.0)
            piece = files.read(name, offset, min(_PIECE_BYTES, count - offset))
            offset += len(piece)
            yield piece
            del piece
            if limit is not None:
                with busy():
                    self.pause(max(0.0, begun + offset / (limit * share) - time.monotonic()))


def _assign(offers: list[tuple[_Offer, Opened]], copy: _Copy) -> Answers[tuple[_Task, bytes]]:
    """Assigns each file to one of the ranks that have it."""
    files = {
        rank: offer.files for rank, (offer, _opened) in enumerate(offers) if offer.files is not None
    }
    holders = [*files]
    assigned = assign_files(files)
    if not holders or len(assigned) < offers[holders[0]][0].of_all:
        raise CheckpointError(f"the hosts do not have all files of step {copy.step} any more")
    tasks: list[list[str]] = [[] for _ in offers]
    for name, holder in assigned.items():
        tasks[holder.rank].append(name)
    layouts = copy.lay_out([opened for _offer, opened in offers])
    return Answers(
        (_Task(names, rank == holders[0]), layout)
        for rank, (names, layout) in enumerate(zip(tasks, layouts, strict=True))
    )


def _is_corrupt(error: BaseException) -> bool:
    """Returns True on all ranks if a host has a damaged file."""
    found = error.failures.values() if isinstance(error, CheckpointException) else ()
    return any(isinstance(cause, Corrupt) for cause, _stack in found)


class _Copy:
    """This rank's part of one copy."""

    def __init__(self, copier: Copier, step: int, digest: bytes, pieces: Pieces) -> None:
        self.step = step
        self.digest = digest
        self._copier = copier
        self._pieces = pieces
        self._found: HostStep | None = None
        self._files: DirectoryFiles | None = None
        self._target: CheckpointTarget | None = None
        self._marker: dict[str, Any] = {}
        self._progress = Progress()

    @property
    def target(self) -> CheckpointTarget:
        assert self._target is not None
        return self._target

    def moved(self) -> int:
        """Returns a number that changes while the copy makes progress."""
        target = self._target
        is_busy = target is not None and target.is_busy
        return self._progress.moved() + (time.monotonic_ns() if is_busy else 0)

    def offer(self, rank: int, ranks: int) -> tuple[_Offer, Opened]:
        """Opens the step on this host, and the target."""
        copier = self._copier
        with suppress(FileNotFoundError):
            self._found = HostStep(copier.steps.disk, self.step)
        if self._found is not None and self._found.digest != self.digest:
            self._found.close()
            self._found = None
        found, files, of_all = self._found, None, 0
        if found is not None:
            # So that no other process deletes the step.
            share_or_warn(found.directory)
            files, of_all = found.files(), len(found.named())
            self._files = DirectoryFiles(found.directory, files)
        # A restart finds the unfinished directory by this attempt.
        attempt = self.digest.hex()[:8]
        self._target = copier.target(self.step, attempt, lambda: self._marker)
        return _Offer(files, of_all), self._target.open(rank, ranks)

    def stop(self) -> None:
        """Does nothing: :meth:`Copier.pause` ends a copy."""

    def lay_out(self, opened: list[Opened]) -> Sequence[bytes]:
        return self.target.lay_out(None, opened)  # type: ignore[arg-type]  # without a plan

    def copy(self, task: _Task, layout: bytes) -> tuple[bytes, bytes] | None:
        """Copies the files of this rank. Returns the metadata and the marker if the rank sends
        them."""
        if task.files:
            self._require_intact(task.files)
        folder = self.target.open_for_copy(layout)
        for name in task.files:
            assert self._files is not None
            count = self._files.size(name)
            pieces = self._progress.counted(self._pieces(self._files, name, self._progress.busy))
            if isinstance(folder, ObjectFolder):
                _copy_to_store(folder.store, name, pieces, count)
            else:
                copy_to_directory(folder, name, pieces, count, self._progress.busy)
        if not task.sends:
            return None
        assert self._found is not None
        return self._found.metadata, self._found.marker

    def _require_intact(self, names: list[str]) -> None:
        """Verifies files of this host, so that the root does not get damaged ones.

        Raises:
            Corrupt: a file is damaged.
        """
        found = self._found
        assert found is not None
        with self._progress.busy():
            fault = first_fault(found.directory, found.index, names)
        if fault:
            raise Corrupt(
                f"{fault}. Step {self.step} is not copied; repair the file, or delete the step on "
                "this disk"
            )

    def complete(self, sent: list[tuple[bytes, bytes] | None]) -> None:
        """Completes the step, on the coordinator."""
        [(metadata, marker)] = [one for one in sent if one is not None]
        self._marker.update(parsed_marker(marker))
        files = decode_index(metadata, METADATA_NAME).files()
        steps = self._copier.steps
        with self._progress.busy(), steps.publishing:
            in_root, key = steps.root_key(self.step), key_of_marker(self._marker)
            is_newer = in_root is not None and in_root > key
            if is_newer or self.step in steps.straight or steps.is_forgotten(self.step, key):
                raise CheckpointError(f"step {self.step} has been saved again or deleted")
            self.target.publish(_core.EncodedMetadata(metadata), files)

    def close(self) -> None:
        if self._target is not None:
            # After a failure, the next attempt continues with the files that are there.
            self._target.keep_all()
            self._target.discard()
        if self._files is not None:
            self._files.close()
        if self._found is not None:
            self._found.close()


def _copy_to_store(store: ObjectStore, name: str, pieces: Iterator[memoryview], count: int) -> None:
    found = store.find(name)
    # An object is complete, and no other save uses its name.
    if found is None or found.bytes != count:
        store.put(name, pieces, count)


register(Part.COPIES, at_exit=Copier.end_all, in_child=Copier.forget_in_child)
