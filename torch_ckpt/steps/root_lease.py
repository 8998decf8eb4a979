"""Leases on roots as managers and commands use them; lease_protocol.py describes the protocol.

A lease belongs to a process. Several managers in one process share it. A thread renews it. A forked
child has none, and never waits for a lock or thread of its parent.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch_ckpt import _core
from torch_ckpt._base.life_cycle import Part, register
from torch_ckpt._base.log import LOGGER
from torch_ckpt.errors import RootInUse
from torch_ckpt.steps.lease_protocol import LEASE_NAME, LeaseRecord, LeaseStore, RunLease, perform


@dataclass(frozen=True)
class Times:
    """Intervals in seconds.

    Attributes:
        renew: time between two heartbeats of a run.
        expiry: time without a heartbeat after which a run on another host counts as dead.
        poll: time between two checks of a lease while it is unknown whether its run is alive.
    """

    renew: float = 10.0
    expiry: float = 60.0
    poll: float = 1.0


TIMES = Times()


class RootLease:
    """One manager's share of its process's lease on a root.

    Several threads may use the object. Once it is released, it never takes the lease again.

    Args:
        store: keeps the lease. If it is None, there is no lease, and the methods do nothing.
        takeover: replace the lease of a running job.
        times: see :class:`Times`.
    """

    def __init__(
        self, store: LeaseStore | None, *, takeover: bool = False, times: Times = TIMES
    ) -> None:
        self._store = store
        self._root = None if store is None else store.root
        self._takeover = takeover
        self._times = times
        self._held: _HeldLease | None = None  # guarded by _leases.lock
        self._is_released = False
        self._found = b""

    def take(self) -> None:
        """Takes the lease. If the disk is full, the next :meth:`require` tries again.

        Raises:
            RootInUse: another running job holds the lease.
            OSError: the root is not writable.
        """
        try:
            self.require()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                # Restoring needs no lease, and a sweep or a deletion may make room.
                LOGGER.warning(
                    "%s: the lease could not be taken (%s). The first save will try again.",
                    self._root,
                    error,
                )
                return
            raise OSError(
                error.errno,
                f"nothing can be saved beneath this root ({error}). Use a root that this "
                "process can write to, or pass read_only=True if you only need to restore",
                self._root,
            ) from error

    def require(self) -> None:
        """Checks that this process holds the lease. Takes the lease first if necessary.

        Raises:
            RootInUse: another running job holds the lease or has taken it over, the lease is
                missing, this share is released, or this process is a forked child.
            OSError: the lease cannot be read or written.
        """
        if self._store is None:
            return
        held = self._held
        if held is None:
            self._refuse_if_released()
            held = self._keep(self._wait_for_lease(self._store))
        held.require()

    def expected(self) -> bytes | None:
        """Returns the bytes that the lease must have for a change beneath the root; None if there
        is no lease. If this manager does not hold the lease, they are the bytes of the lease that
        it has found or held last."""
        if self._store is None:
            return None
        held = self._held
        return self._found if held is None else held.expected

    def marker(self) -> dict[str, Any]:
        """Returns the part of a step's marker that identifies the run."""
        held = self._held
        if held is None:
            return {}
        return {"epoch": held.record.epoch, "run": held.record.describe()}

    def release(self) -> None:
        """Releases this manager's share. Releasing the process's last share releases the lease."""
        with _leases.lock:
            held, self._held = self._held, None
            self._is_released = True
            if held is not None:
                self._found = held.expected
        if held is not None:
            held.release()

    def _refuse_if_released(self) -> None:
        if self._is_released:
            raise RootInUse(
                f"{self._root}: the manager of this root has been closed or deleted, so it can no "
                "longer change the root. Create a new manager to use the root again."
            )

    def _keep(self, held: _HeldLease) -> _HeldLease:
        """Keeps a new share, unless another thread has kept or released one meanwhile."""
        with _leases.lock:
            if self._held is None and not self._is_released:
                self._held = held
                return held
            own = self._held
        held.release()
        if own is None:
            self._refuse_if_released()
        assert own is not None
        return own

    def _wait_for_lease(self, store: LeaseStore) -> _HeldLease:
        times, root = self._times, store.root
        process = {**_core.own_process(), "began_at": round(time.time(), 3)}
        run = RunLease(
            root,
            LeaseRecord(0, uuid.uuid4().hex, True, process),
            expiry=times.expiry,
            newest_epoch=store.newest_epoch,
        )
        is_first = True
        while True:
            with _leases.taking:
                found = store.read()
                self._found = b"" if found is None else found.version
                held = None if found is None else _leases.share(found.record.run)
                if held is not None:
                    return held
                if perform(run.try_take(store, self._takeover), store):
                    return _HeldLease(store, run, times.renew)
            if is_first and run.holder is not None:
                LOGGER.warning(
                    "%s has a lease held by %s. Waiting up to %.0f s to determine whether that "
                    "process is still running",
                    root,
                    run.holder.describe(),
                    times.expiry,
                )
            is_first = False
            _core.fault_point("wait for a lease", os.path.join(root, LEASE_NAME))
            time.sleep(times.poll)


class ObservedLease:
    """The lease on a root as a command has found it. The command's deletions depend on it.

    A command may delete steps while a run holds the lease. If another run takes or releases the
    lease meanwhile, the steps that the command has listed may no longer be those to delete.

    Args:
        store: keeps the lease.
    """

    def __init__(self, store: LeaseStore) -> None:
        self._store = store
        found = store.read()
        self._found = b"" if found is None else found.version

    def expected(self) -> bytes:
        """See :meth:`RootLease.expected`."""
        return self._found

    def require(self) -> None:
        """Checks that the lease has not changed.

        Raises:
            RootInUse: it has.
        """
        found = self._store.read()
        if (b"" if found is None else found.version) == self._found:
            return
        change = (
            "Its record was removed"
            if found is None
            else f"Its record now names {found.record.describe()}"
        )
        raise RootInUse(
            f"{self._store.root}: the lease on this root has changed since the steps were listed. "
            f"{change}. Nothing more was deleted. Run the command again."
        )

    def marker(self) -> dict[str, Any]:
        """See :meth:`RootLease.marker`. A command has no run."""
        return {}


class _HeldLease:
    """The lease that this process holds on one root.

    Attributes:
        record: the record of this process.
        expected: see :meth:`RootLease.expected`.
    """

    def __init__(self, store: LeaseStore, run: RunLease, renew: float) -> None:
        assert run.taken is not None
        self.record = run.taken.record
        self.expected: bytes = run.taken.version
        self.users = 1
        self._store = store
        self._run = run
        self._renew_seconds = renew
        # Neither a heartbeat nor the end of the process waits long for a server.
        self._brief = store.within(renew)
        self._pid = os.getpid()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="torch_ckpt lease", daemon=True)
        _leases.add(self)
        try:
            self._thread.start()
        except RuntimeError as error:
            self.close()
            raise OSError(errno.EAGAIN, f"the system refused to start a thread: {error}") from error

    def require(self) -> None:
        """See :meth:`RootLease.require`."""
        if os.getpid() != self._pid:
            raise RootInUse(
                f"{self._store.root}: this process is a forked child of process {self._pid}, which "
                "holds the lease. Save in the parent, or use another root."
            )
        perform(self._run.require(), self._store)

    def release(self) -> None:
        """Releases one share."""
        if os.getpid() == self._pid and _leases.drop_share(self):
            self.close()

    def close(self) -> None:
        """Releases the lease. Does nothing if the file system fails: the lease then looks like that
        of a dead run."""
        if os.getpid() != self._pid or not _leases.remove(self):
            return
        self._ends.set()
        # The cycle collector may delete a manager in any thread.
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        with suppress(OSError, RootInUse):
            perform(self._run.release(), self._brief)
        self._store.release()

    def close_in_child(self) -> None:
        """Closes the child's copy of the file, so that the lock ends with the parent."""
        self._store.close(unlock=False)

    def _renew(self) -> None:
        while not self._ends.wait(self._renew_seconds):
            # After an error, the next attempt may succeed. Otherwise, saves fail, too.
            with suppress(OSError):
                if not perform(self._run.renew(), self._brief):
                    return


class _Leases:
    """The leases of this process. A forked child has a new object, with new locks.

    Attributes:
        taking: held while a thread takes a lease, which may take long. No fork waits for it.
    """

    def __init__(self) -> None:
        self.taking = threading.Lock()
        # Guards _held, the users and the shares of managers; never held during a system call. The
        # cycle collector may release a lease in a thread that holds the lock.
        self.lock = threading.RLock()
        self._held: list[_HeldLease] = []

    def share(self, run: str) -> _HeldLease | None:
        """Adds a share to the lease of a run, if this process holds it."""
        with self.lock:
            for held in self._held:
                if held.record.run == run:
                    held.users += 1
                    return held
        return None

    def add(self, held: _HeldLease) -> None:
        with self.lock:
            self._held.append(held)

    def drop_share(self, held: _HeldLease) -> bool:
        """Returns True if the share was the last one."""
        with self.lock:
            held.users -= 1
            return held.users == 0

    def remove(self, held: _HeldLease) -> bool:
        """Returns False if the lease was removed already."""
        with self.lock:
            has_it = held in self._held
            if has_it:
                self._held.remove(held)
        return has_it

    def all(self) -> list[_HeldLease]:
        with self.lock:
            return list(self._held)


_leases = _Leases()


def _release_all() -> None:
    """Releases all leases of this process, for its exit."""
    for held in _leases.all():
        held.close()


def _forget_in_child() -> None:
    global _leases
    # The lock may be held by a thread of the parent.
    for held in _leases._held:
        held.close_in_child()
    _leases = _Leases()


register(Part.LEASES, at_exit=_release_all, in_child=_forget_in_child)
