"""The lease on a root: only one run at a time may write beneath the root.

csrc/directory/root_lease.h describes the protocol.
"""

from __future__ import annotations

import errno
import os
import time
from dataclasses import dataclass

from torch_ckpt import _core
from torch_ckpt._base.life_cycle import Part, register
from torch_ckpt._base.log import LOGGER

LEASE_NAME = _core.LEASE_NAME


@dataclass(frozen=True)
class Times:
    """Intervals in seconds.

    Attributes:
        renew: time between two touches of a lease by its run.
        expiry: time without a touch after which a lease from another host counts as dead.
        poll: time between two checks of a lease while it is unknown whether its run is alive.
    """

    renew: float = 10.0
    expiry: float = 60.0
    poll: float = 1.0


TIMES = Times()


class Lease:
    """One manager's share of its process's lease on a root.

    Several threads may use the object, but the same thread must create and release it.

    Args:
        root: a local directory. If it is None, there is no lease, and the methods do nothing.
        takeover: replace the lease of a running job.
        times: see :class:`Times`.
    """

    def __init__(self, root: str | None, *, takeover: bool = False, times: Times = TIMES) -> None:
        self._root = root
        self._takeover = takeover
        self._times = times
        self._held: _core.RootLease | None = None

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
                f"nothing can be saved beneath this root ({error}). Use a directory that this "
                "process can write to, or pass read_only=True if you only need to restore",
                self._root,
            ) from error

    def require(self) -> None:
        """Checks that this process holds the lease. Takes the lease first if necessary.

        Raises:
            RootInUse: another running job holds the lease or has taken it over, or this process is
                a forked child.
            OSError: the lease cannot be written.
        """
        if self._root is None:
            return
        if self._held is None:
            self._held = self._wait_for_lease(self._root)
        self._held.require()

    def release(self) -> None:
        """Releases this manager's share. Releasing the process's last share removes the lease."""
        held, self._held = self._held, None
        if held is not None:
            held.release()

    def _wait_for_lease(self, root: str) -> _core.RootLease:
        times = self._times
        request = _core.LeaseRequest(
            root, takeover=self._takeover, renew=times.renew, expiry=times.expiry
        )
        is_first = True
        while (lease := request.try_take()) is None:
            if is_first:
                LOGGER.warning(
                    "%s has a lease held by %s. Waiting up to %.0f s to determine whether that "
                    "process is still running",
                    root,
                    request.holder,
                    times.expiry,
                )
            is_first = False
            _core.fault_point("wait for a lease", os.path.join(root, LEASE_NAME))
            time.sleep(times.poll)
        return lease


register(Part.LEASES, at_exit=_core.release_leases)
