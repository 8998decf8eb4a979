"""When a job is to stop: one watch for notices, used by several managers.

1. A notice comes to a rank. All ranks agree on the step to stop at (ranks/preemption.py).
2. At that step a manager saves, and says so where it is asked.
3. Where nobody has asked by the next save, the loop goes on, and the next SIGTERM ends the process.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from torch_ckpt._base.log import LOGGER
from torch_ckpt.ranks.preemption import PreemptionWatch, current_watch, watch_for_preemption


@dataclass
class _Shared:
    """What the users of a watch know together.

    Attributes:
        users: that close it when the last one goes; None: somebody else has made it, and closes it.
        agreed: the last step that all ranks have agreed to stop at, once it has come.
    """

    users: int | None
    agreed: int | None = None


class StopNotice:
    """One user's part in the watch of a process group.

    Args:
        signals: to watch for; None: SIGTERM, where this is the main thread.
        file: a notice when it appears.
        process_group: None for the default group.
        timeout: see :func:`torch_ckpt.multihost.watch_for_preemption`.

    Attributes:
        stops: all ranks have come to a step at which this one was to save and stop.
        is_asked: somebody looks at ``stops``.

    Raises:
        ValueError: signals were asked for outside the main thread.
    """

    _shared: ClassVar[WeakKeyDictionary[PreemptionWatch, _Shared]] = WeakKeyDictionary()

    def __init__(
        self,
        signals: Iterable[int] | None,
        file: str | os.PathLike[str] | None,
        process_group: dist.ProcessGroup | None,
        timeout: float,
    ) -> None:
        self.stops = False
        self.is_asked = False
        self._is_ignored = False
        self._watch: PreemptionWatch | None = None
        numbers: tuple[int, ...] = (signal.SIGTERM,) if signals is None else tuple(signals)
        if not numbers and file is None:
            return
        watch = current_watch(process_group)
        if watch is None:
            is_main = threading.current_thread() is threading.main_thread()
            if signals is None and not is_main:
                LOGGER.info("SIGTERM is not watched for: this is not the main thread")
                numbers = ()
                if file is None:
                    return
            watch = watch_for_preemption(
                numbers, file, process_group=process_group, timeout=timeout
            )
            self._shared[watch] = _Shared(users=0)
        elif (signals is not None or file is not None) and not watch.watches(
            () if signals is None else numbers, file
        ):
            LOGGER.warning(
                "the process group is watched for other notices than these already (%s, %s), which "
                "will not be noticed: give all of them to the first watch or manager",
                numbers,
                file,
            )
        self._state = self._shared.setdefault(watch, _Shared(users=None))
        if self._state.users is not None:
            self._state.users += 1
        self._watch = watch
        self._seen = self._state.agreed

    @property
    def reason(self) -> str:
        """What told which rank."""
        return self._watch.reason if self._watch is not None else ""

    def reached(self, step: int) -> bool:
        """Whether all ranks are to stop at this step, or were at one that this user did not ask
        about; once for each notice."""
        if self._watch is None:
            return False
        shared = self._state
        if self._watch.reached(step):
            shared.agreed = step
        if shared.agreed is None or shared.agreed == self._seen or step < shared.agreed:
            return False
        self._seen = shared.agreed
        return True

    def look_whether_ignored(self, rank: int, wait: Callable[[], None]) -> None:
        """Where nobody acts on it, the next SIGTERM does what it did before the watch.

        Args:
            wait: until what was saved for the stop is there: a signal may end the process then.
        """
        if not self.stops or self.is_asked or self._is_ignored:
            return
        self._is_ignored = True
        wait()
        if self._watch is not None:
            self._watch.ignored()
        LOGGER.warning(
            "rank %d was to stop, by %s, and goes on: the loop does not ask should_stop. The "
            "next SIGTERM ends this process",
            rank,
            self.reason,
        )

    def close(self) -> None:
        """Ends this user's part, and with the last one the watch."""
        watch, self._watch = self._watch, None
        if watch is None:
            return
        if self._state.users is not None:
            self._state.users -= 1
            if self._state.users == 0:
                watch.close()
