"""Preemption notices: one watch per process group, shared by all of its managers.

1. A rank receives a notice, and all ranks agree on the step to stop at (multihost/preemption.py).
2. At that step, each manager saves, and its ``should_stop`` becomes true.
3. If the training loop has not read ``should_stop`` by the next save, it ignores the notice. From
   then on, SIGTERM ends the process.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from torch_ckpt._base.log import LOGGER
from torch_ckpt.manager.policies import Preemption
from torch_ckpt.multihost.preemption import PreemptionWatch, current_watch, watch_for_preemption


class PreemptionNotice:
    """One user's share of a process group's watch.

    Args:
        options: which notices to watch for; None for no notice.
        process_group: None for the default group.
        timeout: see :func:`torch_ckpt.multihost.watch_for_preemption`.

    Attributes:
        stops: True once training has reached the step at which all ranks should stop.
        is_polled: True once the training loop has read ``stops``.

    Raises:
        ValueError: ``signals`` are given, and the calling thread is not the main thread.
    """

    # Number of users of each watch that a manager has created. The last user closes the watch.
    _users: ClassVar[WeakKeyDictionary[PreemptionWatch, int]] = WeakKeyDictionary()

    def __init__(
        self,
        options: Preemption | None,
        process_group: dist.ProcessGroup | None,
        timeout: float,
    ) -> None:
        self.stops = False
        self.is_polled = False
        self._is_ignored = False
        self._watch: PreemptionWatch | None = None
        if options is None:
            return
        signals, file = options.signals, options.file
        numbers: tuple[int, ...] = (signal.SIGTERM,) if signals is None else tuple(signals)
        if not numbers and file is None:
            return
        watch = current_watch(process_group)
        if watch is None:
            is_main = threading.current_thread() is threading.main_thread()
            if signals is None and not is_main:
                LOGGER.info(
                    "not watching for SIGTERM: the manager was created outside the main thread"
                )
                numbers = ()
                if file is None:
                    return
            watch = watch_for_preemption(
                numbers, file, process_group=process_group, timeout=timeout
            )
            self._users[watch] = 0
        elif (signals is not None or file is not None) and not watch.watches(
            () if signals is None else numbers, file
        ):
            LOGGER.warning(
                "ignoring Preemption(signals=%s, file=%s): the process group already has a watch "
                "for other notices. Pass all signals and files to the first watch or manager.",
                numbers,
                file,
            )
        if watch in self._users:
            self._users[watch] += 1
        self._watch = watch
        self._seen = watch.stop_step

    @property
    def reason(self) -> str:
        """Describes the notice and the rank that received it; "" if there was no notice."""
        return self._watch.reason if self._watch is not None else ""

    def reached(self, step: int) -> bool:
        """True if all ranks stop at this step, or at an earlier step for which this method was not
        called. True only once per notice."""
        if self._watch is None:
            return False
        self._watch.reached(step)
        stop_step = self._watch.stop_step
        if stop_step is None or stop_step == self._seen or step < stop_step:
            return False
        self._seen = stop_step
        return True

    def restore_signals_if_ignored(self, rank: int, wait: Callable[[], None]) -> None:
        """Stops handling signals if the training loop ignores the notice. SIGTERM then has the same
        effect as before the watch.

        Args:
            wait: waits for the save at the stop. Called first, because afterwards a signal may end
                the process.
        """
        if not self.stops or self.is_polled or self._is_ignored:
            return
        self._is_ignored = True
        wait()
        if self._watch is not None:
            self._watch.ignored()
        LOGGER.warning(
            "rank %d continues after a preemption notice (%s), because the training loop does not "
            "read should_stop. The next SIGTERM will end this process.",
            rank,
            self.reason,
        )

    def close(self) -> None:
        """Releases this user's share. The last user closes the watch."""
        watch, self._watch = self._watch, None
        if watch is not None and watch in self._users:
            self._users[watch] -= 1
            if not self._users[watch]:
                watch.close()
