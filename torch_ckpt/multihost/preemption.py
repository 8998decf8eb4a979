"""Stops all ranks at the same step after one of them has received a preemption notice.

1. Every rank has a thread that waits for a notice: a signal to the process, a file, or the key
   ``{round}/notice`` in the store, which the first rank with a notice sets.
2. The thread then posts the last step that training has reached on its rank. From then on, a call
   for a later step blocks until all ranks have agreed on a step. A call for that step or an earlier
   one does not block.
3. The threads agree on the largest posted step plus one. No rank can be past it.
4. The first call for that step, or for a later one, returns True. The next notice starts another
   round.

The threads never wait for training. So there is no deadlock if one rank's training is a step ahead
and waits in a collective for a rank that is blocked in a call: its thread has posted its step.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import signal
import threading
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from torch_ckpt import _core
from torch_ckpt._base.life_cycle import LiveObjects, Part, register
from torch_ckpt._base.system import absolute
from torch_ckpt.ranks.collective_call import explained
from torch_ckpt.ranks.exchange import Exchange
from torch_ckpt.ranks.group import RankGroup, current_group, group_for
from torch_ckpt.ranks.store import peek

logger = logging.getLogger(__name__)

#: Default number of seconds after which a rank that does not post its step is declared dead. Short,
#: because little time is left after a notice.
TIMEOUT_SECONDS = 30.0

#: Seconds between two checks of the store and the file.
POLL_SECONDS = 1.0

_NAME = "reached_preemption_sync_point()"

# The step of a rank whose training has not reached any step.
_NO_STEP = -1

# Messages to the thread. All other messages are notices.
_CLOSE = "close"
_REACHED = "reached"


class PreemptionWatch:
    """Watches for preemption notices on one rank. Created by :func:`watch_for_preemption`.

    If you use the watch as a context manager, the watch is closed at the end of the block.

    Examples:
        ```python
        with multihost.watch_for_preemption(file="/run/preempted") as watch:
            for step in range(first, last):
                train_one_step()
                if multihost.reached_preemption_sync_point(step):
                    save(step)
                    print("stopped by", watch.reason)
                    break
        ```
    """

    def __init__(
        self,
        group: RankGroup,
        signals: Iterable[int],
        file: str | os.PathLike[str] | None,
        poll_seconds: float,
        timeout: float,
    ) -> None:
        #: Returns the ranks for which :func:`current_watch` finds this watch.
        self.group: Callable[[], RankGroup | None] = lambda: None
        self._rank = group.rank
        self._file = _absolute(file)
        self._poll_seconds = poll_seconds
        self._timeout = timeout
        # Messages to the thread. Signal handlers may call put() on it.
        self._wake: queue.SimpleQueue[str] = queue.SimpleQueue()
        # Guards all following fields, except the fields that signal handlers set.
        self._changed = threading.Condition()
        self._step = _NO_STEP
        self._posted: int | None = None
        self._agreed: tuple[int, str] | None = None
        self._failure: BaseException | None = None
        #: The last step at which :meth:`reached` has returned True.
        self.stop_step: int | None = None
        self._reason = ""
        self._closed = False
        self._is_ignored = False
        self._signalled = False
        self._seen_file = False
        self._before: dict[int, Any] = {}
        # Only the thread holds a reference to the ranks, and through them to the store, which
        # must not outlive the process group.
        self._thread = threading.Thread(
            target=self._run, args=(group,), name="torch_ckpt preemption", daemon=True
        )
        try:
            for number in signals:
                before = _before(number)
                signal.signal(number, self._handle)
                self._before[number] = before
        except BaseException:
            self._restore_handlers()
            raise
        self._thread.start()
        _watches.add(self)

    @property
    def reason(self) -> str:
        """The latest notice for which :func:`reached_preemption_sync_point` has returned True, and
        the rank that received this notice: for example, "SIGTERM on rank 3". Empty until the
        function first returns True."""
        with self._changed:
            return self._reason

    def watches(self, signals: Iterable[int], file: str | os.PathLike[str] | None) -> bool:
        """Returns True if the watch already covers the given signals and file. ``file=None`` means
        no file."""
        is_file = file is None or _absolute(file) == self._file
        return is_file and set(signals) <= set(self._before)

    def reached(self, step: int) -> bool:
        """Implements :func:`reached_preemption_sync_point` for this watch's ranks."""
        if step < 0:
            raise ValueError(f"step {step} is negative: count steps from 0")
        with self._changed:
            if step == self.stop_step:
                return True
            # If this process has received a signal, wait until its thread has posted the step.
            self._wait_until(lambda: not self._signalled or self._posted is not None)
            if self._posted is not None and step > self._posted:
                self._wait_until(lambda: self._agreed is not None)
            self._step = step
            if self._agreed is None or step < self._agreed[0]:
                return False
            self._reason = self._agreed[1]
            self.stop_step = step
            self._agreed = self._posted = None
            # Put this before resetting _signalled: a signal that arrives between the two statements
            # is queued behind _REACHED, so the thread counts it for the next round.
            self._wake.put(_REACHED)
            self._signalled = False
            return True

    def ignored(self) -> None:
        """Restores the effect that SIGTERM had before the watch. Called if the program ignores a
        notice."""
        self._is_ignored = True

    def close(self) -> None:
        """Ends the watch and restores the previous signal handlers.

        Only the main thread can set signal handlers. If another thread closes the watch, the
        watch's handlers stay installed and forward signals to the previous handlers.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
        self._wake.put(_CLOSE)
        _watches.discard(self)
        if threading.current_thread() is threading.main_thread():
            self._restore_handlers()
        self._thread.join(self._poll_seconds + 1.0)

    def __enter__(self) -> PreemptionWatch:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _wait_until(self, so: Callable[[], bool]) -> None:
        while True:
            if self._closed:
                raise RuntimeError(
                    f"{_NAME}: the watch was closed, or its process group was destroyed"
                )
            if self._failure is not None:
                raise self._failure
            if so():
                return
            self._changed.wait(self._poll_seconds)

    def _group_was_destroyed(self) -> None:
        """Ends the watch of a destroyed group. Its handlers stay installed and forward signals."""
        self._closed = True
        self._wake.put(_CLOSE)
        # Wait for the thread: it keeps the store alive, the next group may need the store's port,
        # and the interpreter must not exit while the thread uses the store. But the garbage
        # collector may call this method in the thread itself.
        if threading.current_thread() is not self._thread:
            self._thread.join(self._poll_seconds + 1.0)

    # --- signals ---------------------------------------------------------------------------------

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal. Runs in the main thread between any two instructions, so it must not
        take locks."""
        before = self._before.get(number)
        is_notice = not (self._closed or (self._is_ignored and number == signal.SIGTERM))
        if is_notice:
            self._signalled = True
            self._wake.put(f"{_name(number)} on rank {self._rank}")
        elif before is signal.SIG_DFL and signal.getsignal(number) == self._handle:
            signal.signal(number, before)
            signal.raise_signal(number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def _restore_handlers(self) -> None:
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, before)

    # --- the thread ------------------------------------------------------------------------------

    def _run(self, group: RankGroup) -> None:
        for number in itertools.count():
            reason = self._wait_for_notice(group, number)
            if reason is None:
                return
            ranks = Exchange.open(group, "save", self._timeout)
            try:
                agreed = self._agree(group, ranks, number, reason)
            except BaseException as error:
                self._publish(None, error)
                return
            else:
                logger.warning(
                    "preemption notice (%s): all ranks stop at step %d", agreed[1], agreed[0]
                )
                self._publish(agreed, None)
            finally:
                ranks.close(min(10.0, self._timeout))
            while (woken := self._wake.get()) != _REACHED:
                if woken == _CLOSE:
                    return

    def _publish(self, agreed: tuple[int, str] | None, failure: BaseException | None) -> None:
        with self._changed:
            self._agreed, self._failure = agreed, failure
            self._changed.notify_all()

    def _wait_for_notice(self, group: RankGroup, number: int) -> str | None:
        """Returns the notice and the rank that received it, or None if the watch is closed."""
        may_ask = group.distributed
        while True:
            try:
                woken = self._wake.get(timeout=self._poll_seconds)
            except queue.Empty:
                woken = ""
            if woken:
                return None if woken == _CLOSE else woken
            if self._file is not None:
                _core.fault_point("stat", self._file)
                # As long as the file exists, it counts as a single notice.
                before, self._seen_file = self._seen_file, os.path.exists(self._file)
                if self._seen_file and not before:
                    return f"{self._file} on rank {self._rank}"
            if may_ask:
                try:
                    keys = group.keys(str(number))
                    if (notice := peek(keys, "notice")) is not None:
                        return notice.decode()
                except RuntimeError as error:
                    # At the end of training, rank 0 may have exited together with the store.
                    may_ask = False
                    logger.info("lost the store; notices to other ranks are not seen: %s", error)

    def _agree(
        self, group: RankGroup, ranks: Exchange, number: int, reason: str
    ) -> tuple[int, str]:
        """Agrees with the other ranks. Returns the step at which all ranks return True, and the
        first notice."""

        def post() -> tuple[tuple[int, str], None]:
            first = reason
            if group.distributed:
                keys = group.keys(str(number))
                first = keys.compare_set("notice", "", reason).decode()
            with self._changed:
                self._posted = self._step
                self._changed.notify_all()
                return (self._posted, first), None

        def largest(posted: list[tuple[int, str]]) -> tuple[int, str]:
            if group.distributed and number:
                # By now, all ranks have finished the previous round.
                group.keys(str(number - 1)).delete_key("notice")
            return max(step for step, _first in posted) + 1, posted[0][1]

        try:
            return ranks.exchange("preemption", post, largest)[0]
        except CheckpointException as error:
            raise explained(error, _NAME, ranks.rank, self._timeout) from error


def _absolute(file: str | os.PathLike[str] | None) -> str | None:
    """Returns an absolute path, because the program may change its working directory. Returns None
    if there is no file."""
    return os.fspath(absolute(file)) if file is not None and os.fspath(file) else None


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


def _before(number: int) -> Any:
    """Returns the current handler of a signal, skipping handlers of closed watches."""
    handler: Any = signal.getsignal(number)
    while isinstance(watch := getattr(handler, "__self__", None), PreemptionWatch):
        if not watch._closed:
            break
        handler = watch._before[number]
    return handler


def signal_numbers(signals: Iterable[int], option: str) -> tuple[int, ...]:
    """Checks the signals to watch, and returns their numbers.

    Args:
        signals: the signal numbers.
        option: name of the option, for errors.

    Raises:
        TypeError: ``signals`` is not an iterable of numbers.
        ValueError: a signal does not exist or cannot be watched.
    """
    form = f"{option} must be a list of signal numbers such as [signal.SIGTERM]"
    if isinstance(signals, str) or not isinstance(signals, Iterable):
        raise TypeError(f"{form}, got {signals!r}")
    numbers = tuple(signals)
    watchable = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    for number in numbers:
        if not isinstance(number, int):
            raise TypeError(f"{form}, but one element is {number!r}")
        if number not in watchable:
            raise ValueError(f"{option}: {number!r} is not a signal that a process can watch")
    return numbers


_watches: LiveObjects[PreemptionWatch] = LiveObjects()


def watch_for_preemption(
    signals: Iterable[int] = (signal.SIGTERM,),
    file: str | os.PathLike[str] | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    poll_seconds: float = POLL_SECONDS,
    timeout: float = TIMEOUT_SECONDS,
) -> PreemptionWatch:
    """Starts watching for preemption notices. Every rank must call this function before its first
    step.

    The call does not wait for other ranks. After all ranks have called
    :meth:`PreemptionWatch.close`, the group can be watched again. A watched signal no longer ends
    this process. A handler that was already set for the signal is still called. Exception: Python's
    default handler for SIGINT is not called. In forked child processes, the previous handlers are
    restored.

    Args:
        signals: numbers of the signals to watch. If any are given, call this function in the main
            thread.
        file: path of a file to watch. If the file appears, every rank that can see the file
            receives a notice. If the file is removed and appears again, each of these ranks
            receives another notice. Remove the file before the next run; otherwise, the next run
            also receives a notice.
        process_group: the ranks that stop together; None means the default group.
        poll_seconds: seconds between two checks of the file and the store. Each check runs in a
            thread, and makes one request to the store.
        timeout: after a notice, each rank must post its step number to the store within this many
            seconds. A rank that takes longer is declared dead.

    Returns:
        The watch.

    Raises:
        TypeError: ``signals`` contains a value that is not a number.
        ValueError: the group is already being watched, signals are given but the caller is not the
            main thread, this process is not in the group, or a signal cannot be watched.

    Examples:
        ```python
        multihost.watch_for_preemption([signal.SIGTERM, signal.SIGUSR1])
        ```
    """
    numbers = signal_numbers(signals, "signals")
    if numbers and threading.current_thread() is not threading.main_thread():
        raise ValueError(
            "signals can be watched only from the main thread: call watch_for_preemption there "
            "before the first step"
        )
    if current_watch(process_group) is not None:
        raise ValueError("this process group is already being watched: close() that watch first")
    group = group_for(process_group, "preemption")
    # With other keys than the previous watch, so that a new watch does not find its notice.
    ranks = group.subgroup(group.next_prefix("watch"))
    watch = PreemptionWatch(ranks, numbers, file, poll_seconds, timeout)
    watch.group = weakref.ref(group)
    known = current_group(process_group)
    if known is not None and (members := known()) is not None:
        weakref.finalize(members, watch._group_was_destroyed).atexit = False
    return watch


def reached_preemption_sync_point(
    step: int, *, process_group: dist.ProcessGroup | None = None
) -> bool:
    """Returns True at the step at which all ranks must save and stop. Call this function once per
    step.

    When any rank receives a notice, the ranks agree on a step to stop at: the largest step that any
    rank has reached, plus one. On every rank, the call for the agreed step returns True. If a rank
    skips the agreed step, that rank's first call for a later step returns True instead. After a
    call has returned True, only repeated calls for the same step return True. If training
    continues, the next notice makes the ranks agree on another step.

    Without a notice, a call only compares a few numbers, and a thread checks the store once per
    second. After a notice, each rank posts its latest step to the store. A rank's first call for a
    later step blocks until the background threads of the other ranks have posted their steps,
    usually for at most ``poll_seconds``.

    If :func:`watch_for_preemption` was not called, the first call starts watching for SIGTERM. In
    that case, a SIGTERM that arrives before the first call ends the process.

    Args:
        step: the step number, counted from 0 and the same on all ranks.
        process_group: the ranks that stop together; None means the default group.

    Raises:
        TimeoutError: some ranks did not post their steps after a notice. The message names those
            ranks. Every later call raises the same error.
        ConnectionError: the store was lost after a notice. Every later call raises the same error.
        ValueError: ``step`` is negative, the first call is not in the main thread, or this process
            is not in the group.

    Examples:
        ```python
        for step in range(first, last):
            train_one_step()
            if multihost.reached_preemption_sync_point(step):
                torch_ckpt.save(state, f"checkpoints/{step}")
                break
        ```
    """
    watch = current_watch(process_group)
    if watch is None:
        watch = watch_for_preemption(process_group=process_group)
    return watch.reached(step)


def current_watch(process_group: dist.ProcessGroup | None) -> PreemptionWatch | None:
    """Returns the watch of a process group (None for the default group), or None if there is none.

    Raises:
        ValueError: this process is not in the group.
    """
    group = group_for(process_group, "preemption")
    return next((watch for watch in _watches if watch.group() is group), None)


def _close_all() -> None:
    # No request to the store may run while the interpreter shuts down.
    for watch in _watches:
        watch.close()


def _forget_in_child() -> None:
    # Restore the handlers in the child, because data loaders stop their workers with signals.
    for watch in _watches:
        watch._restore_handlers()


register(Part.NOTICES, at_exit=_close_all, in_child=_forget_in_child)
