"""How one rank's part in a save ends: somebody takes its results, or aborts it; never both."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection
from typing import Any, TypeVar

from torch_ckpt.checkpoint.lease import DirectoryLease
from torch_ckpt.errors import CheckpointError

T = TypeVar("T")


class Ending:
    """Of one rank's part in one save. Its writer and its write share it.

    Safe for use by several threads. A pickle of it is not aborted: in another process nobody knows
    whether the results were taken.

    Args:
        leases: that protect them; a writer that is dropped ends them as ever.
    """

    def __init__(self, leases: Collection[DirectoryLease] = ()) -> None:
        self._leases = [weakref.ref(lease) for lease in leases]
        self._lock = threading.Lock()
        self._is_writing = False
        self._is_taken = False
        self._is_aborted = False
        self._files: Collection[str] = ()
        # Of an abort: another save may have the files' names once they have ended.
        self._held: list[DirectoryLease] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return _elsewhere, ()

    @property
    def is_aborted(self) -> bool:
        """Whether the results are not to be had any more."""
        return self._is_aborted

    def begin(self) -> None:
        """Files are made from here on.

        Raises:
            CheckpointError: it was aborted.
        """
        with self._lock:
            if self._is_aborted:
                raise _aborted()
            self._is_writing = True

    def end(self, files: Collection[str]) -> None:
        """The write has ended, and has left these files."""
        with self._lock:
            self._is_writing = False
            self._files = files
            if self._is_aborted:
                self._withdraw()

    def take(self, outcome: T) -> T | CheckpointError:
        """The outcome, which nobody aborts any more, or why it is not to be had."""
        with self._lock:
            if self._is_aborted:
                return _aborted()
            self._is_taken = True
            return outcome

    def abort(self) -> None:
        """Removes the files, once the write has ended, unless somebody has the results."""
        with self._lock:
            if self._is_taken or self._is_aborted:
                return
            self._is_aborted = True
            leases = [reference() for reference in self._leases]
            self._held = [lease for lease in leases if lease is not None and lease.is_open]
            if not self._is_writing:
                self._withdraw()

    def _withdraw(self) -> None:
        held, self._held = self._held, []
        if held:
            # By name: the directory may be shared for long, by ranks that have yet to abort.
            held[0].remove(self._files)
        for lease in held:
            lease.abandon()


def _aborted() -> CheckpointError:
    # Each time another one: who keeps an error keeps the frames through which it came.
    return CheckpointError("aborted: its queue was closed with abort=True, or gave its call up")


def _elsewhere() -> Ending:
    ending = Ending()
    ending._is_taken = True
    return ending
