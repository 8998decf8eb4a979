"""The lease on a root: only one run at a time writes beneath the root.

The protocol uses two calls of a store that keeps one record for each root: ``read``, and
``compare_and_swap``, which writes a record only if the store still has the version that was read.

1. The record has an epoch, a run and a state: held or released. A run is one process that has
   taken the lease once; its id is never used again. After the first run, a root always has a
   record.
2. Take: a run reads the record. If another run holds the lease, the run must be dead (3), or the
   user must have asked for a takeover. The run then swaps the record for its own. Its epoch is 1 +
   the greatest epoch of the record and of the steps' markers, so epochs only increase, even if a
   user has removed the record. If the swap fails, the run starts again.
3. A run is dead if the store or the host knows that its process has ended. If they do not know, the
   run is alive if it renews the lease while another run waits. It is dead if it has not renewed the
   lease for a minute.
4. Renew: every ten seconds, the run swaps its record for the same record, which changes the
   heartbeat that the store keeps with it. It never restores a record that it has lost.
5. Require: before a run writes a step, completes it, deletes it or removes leftovers, it reads the
   record. If the record is missing or belongs to another run, this run has lost the lease for ever,
   and the operation fails with an error that names both runs.
6. The marker of a step has the epoch of its run. A step is completed, replaced and deleted by
   renames. On a local file system, these renames, the check of 5 before them and the swap of 2 hold
   the same lock (csrc/directory/root_lock.h). A run that is suspended between 5 and the rename
   therefore cannot lose the lease in between. Where hosts do not see each other's locks, the epochs
   in the markers show that a run has written after it was taken over (lineage.py).
7. Release: the run swaps its record for a released one with the same epoch. It changes nothing if
   it has lost the lease. A run that has released the lease never takes it again, so that a deletion
   that was queued before fails.

The operations are generators, which yield their calls of the store, so that tests can run any
schedule of several runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar

from torch_ckpt import _core
from torch_ckpt.errors import RootInUse

T = TypeVar("T")

LEASE_NAME = _core.LEASE_NAME

# A later time is not the start time of a process.
_LATEST_SECONDS = 1e11


@dataclass(frozen=True)
class LeaseRecord:
    """The record of a lease.

    Attributes:
        epoch: number of the run among the runs of its root; 0 if the run was one of version 0.1.
        run: id of the run; empty if the run was one of version 0.1.
        is_held: False if the run has released the lease.
        process: the process of the run: ``host``, ``boot``, ``pids``, ``pid``, ``start`` and
            ``began_at``. Any of them may be missing.
    """

    epoch: int
    run: str
    is_held: bool
    process: Mapping[str, Any] = field(default_factory=dict)

    def describe(self) -> str:
        """Names the process of the run."""
        process = self.process
        text = f"process {process.get('pid') or '?'} on host {process.get('host') or '?'}"
        began_at = process.get("began_at")
        if isinstance(began_at, int | float) and abs(began_at) < _LATEST_SECONDS:
            text += f", since {time.ctime(began_at)}"
        return text


class StoredRecord(NamedTuple):
    """A record in a store.

    Attributes:
        version: differs from the versions of all other records of the root.
        heartbeat: changes whenever the run renews its lease.
    """

    record: LeaseRecord
    version: Any
    heartbeat: Any


class LeaseStore(Protocol):
    """Keeps the record of one root.

    Attributes:
        root: the root, for messages.
    """

    root: str

    def within(self, seconds: float) -> LeaseStore:
        """Returns the same store with a limit of ``seconds`` for each call."""

    def newest_epoch(self) -> int:
        """Returns the greatest epoch of the steps' markers; 0 if there is none."""

    def read(self) -> StoredRecord | None:
        """Reads the record; None if there is none."""

    def compare_and_swap(
        self, expected: StoredRecord | None, record: LeaseRecord
    ) -> StoredRecord | None:
        """Writes a record if the store has the version of ``expected``; None: if it has none. If
        ``expected`` has the same record, changes its heartbeat.

        Returns:
            The record as stored; None if the store has another version.
        """

    def is_alive(self, found: StoredRecord) -> bool | None:
        """Returns True if the run of a held lease is alive; None if that is unknown."""

    def age(self, found: StoredRecord) -> float | None:
        """Returns the seconds since the heartbeat by the clock of the store; None if unknown."""

    def release(self) -> None:
        """Frees the resources of this process, after the lease is released."""

    def close(self, *, unlock: bool = True) -> None:
        """Closes what this process has open. A forked child does not unlock it."""


def is_alive_on_this_host(record: LeaseRecord) -> bool | None:
    """Returns True if the process of a run is alive; None if it ran on another host."""
    process, own = record.process, _core.own_process()
    is_on_this_host = bool(own["boot"]) and all(
        process.get(name) == own[name] for name in ("boot", "host", "pids")
    )
    if not is_on_this_host:
        return None
    pid, start = _number(process.get("pid")), _number(process.get("start"))
    # If the PID is this process's, the process has replaced its program by exec.
    if pid is None or start is None or pid == own["pid"]:
        return False
    return _core.is_alive(pid, start)


def _number(value: Any) -> int | None:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if 0 <= number < 1 << 63 else None


StoreCall = Callable[[LeaseStore], "StoredRecord | None"]
Operation = Generator[StoreCall, "StoredRecord | None", T]


def perform(operation: Operation[T], store: LeaseStore) -> T:
    """Performs an operation of the protocol."""
    result: StoredRecord | None = None
    try:
        call = next(operation)
        while True:
            result = call(store)
            call = operation.send(result)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


class RunLease:
    """One run's view of the lease on a root.

    Args:
        root: the root, for messages.
        mine: the record of this run; the epoch is set when the run takes the lease.
        expiry: seconds without a heartbeat after which a run is dead.
        newest_epoch: returns the greatest epoch of the steps' markers.
        clock: returns seconds.

    Attributes:
        taken: the record of this run; None until the run has taken the lease.
        holder: the run that this run has found to hold the lease; None if there was none.
    """

    def __init__(
        self,
        root: str,
        mine: LeaseRecord,
        *,
        expiry: float,
        newest_epoch: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root = root
        self._mine = mine
        self._expiry = expiry
        self._newest_epoch = newest_epoch
        self._clock = clock
        self._first: tuple[StoredRecord, float] | None = None
        self.taken: StoredRecord | None = None
        self.holder: LeaseRecord | None = None

    def try_take(self, store: LeaseStore, takeover: bool) -> Operation[bool]:
        """Takes the lease.

        Args:
            store: shows whether the run that holds the lease is alive.
            takeover: take the lease even if the run that holds it is alive.

        Returns:
            False if it is not known yet whether the run that holds the lease is alive.

        Raises:
            RootInUse: the run that holds the lease is alive.
        """
        while True:
            found = yield _read
            if found is not None and found.record.is_held and not takeover:
                self.holder = found.record
                is_alive = self._is_alive(store, found)
                if is_alive:
                    raise RootInUse(
                        f"{self._root}: another run is writing to this root: "
                        f"{found.record.describe()}. Wait until it has ended, or use another root. "
                        "To take over the root and make the other run's saves fail, pass "
                        "takeover=True to CheckpointManager."
                    )
                if is_alive is None:
                    return False
            epoch = max(found.record.epoch if found is not None else 0, self._newest_epoch())
            taken = yield _swap(found, replace(self._mine, epoch=epoch + 1))
            if taken is not None and found is None and epoch != self._newest_epoch():
                # Another run has saved steps since, and a user has removed its record.
                epoch = self._newest_epoch()
                taken = yield _swap(taken, replace(self._mine, epoch=epoch + 1))
            if taken is not None:
                self.taken = taken
                return True

    def renew(self) -> Operation[bool]:
        """Changes the heartbeat. Returns False if this run has lost the lease."""
        found = yield _read
        if found is None or not self._owns(found):
            return False
        renewed = yield _swap(found, found.record)
        return renewed is not None

    def require(self) -> Operation[None]:
        """Checks that this run holds the lease.

        Raises:
            RootInUse: the lease is missing, another run has taken it, or this run has released it.
        """
        assert self.taken is not None
        found = yield _read
        if found is not None and self._owns(found):
            return
        mine = _with_epoch(self.taken.record)
        if found is None:
            raise RootInUse(
                f"{self._root}: the lease of this run, {mine}, is missing. {LEASE_NAME} or the "
                "root was removed, so another run may have used the root since. This run can no "
                f"longer save to it. Start the run again, and do not remove {LEASE_NAME}."
            )
        if found.record.run == self.taken.record.run:
            raise RootInUse(
                f"{self._root}: this run, {mine}, has released its lease, so it can no longer "
                "change this root. Create a new manager to use the root again."
            )
        has_ended = "" if found.record.is_held else " and has ended since"
        raise RootInUse(
            f"{self._root}: {_with_epoch(found.record)} has taken over this root from {mine}"
            f"{has_ended}. This run can no longer save to it. End this run, or use another root."
        )

    def release(self) -> Operation[None]:
        """Releases the lease, unless this run has lost it."""
        found = yield _read
        if found is not None and self._owns(found):
            yield _swap(found, replace(found.record, is_held=False))

    def _owns(self, found: StoredRecord) -> bool:
        return self.taken is not None and found.record == self.taken.record

    def _is_alive(self, store: LeaseStore, found: StoredRecord) -> bool | None:
        is_alive = store.is_alive(found)
        if is_alive is not None:
            return is_alive
        now = self._clock()
        if self._first is None or self._first[0].record != found.record:
            self._first = found, now
        first, since = self._first
        if first.heartbeat != found.heartbeat:
            return True
        age = store.age(found)
        if now - since > self._expiry or (age is not None and age > self._expiry):
            return False
        return None


def _read(store: LeaseStore) -> StoredRecord | None:
    return store.read()


def _swap(expected: StoredRecord | None, record: LeaseRecord) -> StoreCall:
    return lambda store: store.compare_and_swap(expected, record)


def _with_epoch(record: LeaseRecord) -> str:
    return f"{record.describe()} (epoch {record.epoch})"
