"""All ranks stop at the same step when one of them is told to.

1. Every rank has a thread that waits for a notice: a signal to this process, a file, or the key
   ``{round}/notice`` in the store, which the first rank with a notice sets.
2. The thread then posts the last step that training on its rank has come to. From there on a call
   for a later step waits for the answer. Not so a call for an earlier one.
3. The ranks' threads agree: the largest of the posted steps, plus one. No rank can have passed it.
4. The first call for that step, or a later one, returns True. The next notice is another round.

Threads agree with threads, never with training: a rank whose training is a step ahead and waits
there for one that waits here has posted its step, and is waited for no longer.
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
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from torch_ckpt import _core
from torch_ckpt._base.life_cycle import Part, register
from torch_ckpt._base.live_objects import LiveObjects
from torch_ckpt.ranks.calls import explained, meeting_of
from torch_ckpt.ranks.meeting import Meeting, Ranks
from torch_ckpt.ranks.store_thread import peek

logger = logging.getLogger(__name__)

#: A rank that does not post its step for longer is given up; notices leave little time.
TIMEOUT_SECONDS = 30.0

#: How often the store and the file are looked at.
POLL_SECONDS = 1.0

_NAME = "reached_preemption_sync_point()"

# A step before all others, of a rank whose training has not come to any.
_NO_STEP = -1

# What wakes the thread beside notices.
_CLOSE = "close"
_REACHED = "reached"


class PreemptionWatch:
    """Waits for notices on one rank; made by :func:`watch_for_preemption`. A context manager."""

    def __init__(
        self,
        meeting: Meeting,
        signals: Iterable[int],
        file: str | os.PathLike[str] | None,
        poll_seconds: float,
        timeout: float,
        on_close: Callable[[PreemptionWatch], None],
    ) -> None:
        self._rank = meeting.rank
        self._file = os.fspath(file) if file is not None else None
        self._poll_seconds = poll_seconds
        self._timeout = timeout
        self._on_close = on_close
        # What ends the thread's waiting. Its put() may be called by a signal handler.
        self._wake: queue.SimpleQueue[str] = queue.SimpleQueue()
        # All below is guarded by this, but for what handlers set.
        self._changed = threading.Condition()
        self._step = _NO_STEP
        self._posted: int | None = None
        self._agreed: tuple[int, str] | None = None
        self._failure: BaseException | None = None
        self._returned_true_at: int | None = None
        self._reason = ""
        self._closed = False
        self._is_ignored = False
        self._signalled = False
        self._seen_file = False
        self._before: dict[int, Any] = {}
        # Only the thread has the meeting, and with it the store: it must go with the group.
        self._thread = threading.Thread(
            target=self._run, args=(meeting,), name="torch_ckpt preemption", daemon=True
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
        """What told which rank in the last round that was agreed on: "SIGTERM on rank 3"."""
        with self._changed:
            return self._reason

    def watches(self, signals: Iterable[int], file: str | os.PathLike[str] | None) -> bool:
        """Whether these signals and this file, if any, are among what it waits for."""
        is_file = file is None or os.fspath(file) == self._file
        return is_file and set(signals) <= set(self._before)

    def reached(self, step: int) -> bool:
        """As :func:`reached_preemption_sync_point`, for the ranks of this watch."""
        if step < 0:
            raise ValueError(f"step {step} is negative: count steps from 0")
        with self._changed:
            if step == self._returned_true_at:
                return True
            # A notice to this process counts from here on, although its thread may not have run.
            self._wait_until(lambda: not self._signalled or self._posted is not None)
            if self._posted is not None and step > self._posted:
                self._wait_until(lambda: self._agreed is not None)
            self._step = step
            if self._agreed is None or step < self._agreed[0]:
                return False
            self._reason = self._agreed[1]
            self._returned_true_at = step
            self._agreed = self._posted = None
            # First: a signal between the two is one of the next round, of which the thread knows.
            self._wake.put(_REACHED)
            self._signalled = False
            return True

    def ignored(self) -> None:
        """Nobody acts on the notice: from here on SIGTERM does what it did before."""
        self._is_ignored = True

    def close(self) -> None:
        """Ends the watch and sets the handlers of signals as they were.

        Only the main thread can set handlers: elsewhere they stay, and pass signals on.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
        self._wake.put(_CLOSE)
        _watches.discard(self)
        if threading.current_thread() is threading.main_thread():
            self._restore_handlers()
        self._on_close(self)
        self._thread.join(self._poll_seconds + 1.0)

    def __enter__(self) -> PreemptionWatch:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _wait_until(self, so: Callable[[], bool]) -> None:
        while True:
            if self._closed:
                raise RuntimeError(f"{_NAME}: the watch was closed, or its process group destroyed")
            if self._failure is not None:
                raise self._failure
            if so():
                return
            self._changed.wait(self._poll_seconds)

    def _group_has_gone(self) -> None:
        """From here on the signals mean what they did, although the handlers stay."""
        self._closed = True
        self._wake.put(_CLOSE)
        # Until then it has the store, whose port the next group may want, and the interpreter must
        # not end. It may be the thread in which the collector has found the group.
        if threading.current_thread() is not self._thread:
            self._thread.join(self._poll_seconds + 1.0)

    # --- signals ---------------------------------------------------------------------------------

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread between any two of its instructions: takes no lock."""
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

    def _run(self, meeting: Meeting) -> None:
        for number in itertools.count():
            reason = self._wait_for_notice(meeting, number)
            if reason is None:
                return
            ranks = meeting.ranks(self._timeout)
            try:
                agreed = self._agree(meeting, ranks, number, reason)
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

    def _wait_for_notice(self, meeting: Meeting, number: int) -> str | None:
        """Who was told by what; None at the end."""
        may_ask = meeting.distributed
        while True:
            try:
                woken = self._wake.get(timeout=self._poll_seconds)
            except queue.Empty:
                woken = ""
            if woken:
                return None if woken == _CLOSE else woken
            if self._file is not None:
                _core.fault_point("stat", self._file)
                # A file is one notice for as long as it is there.
                before, self._seen_file = self._seen_file, os.path.exists(self._file)
                if self._seen_file and not before:
                    return f"{self._file} on rank {self._rank}"
            if may_ask:
                try:
                    keys = meeting.keys(str(number))
                    if (notice := peek(keys, "notice")) is not None:
                        return notice.decode()
                except RuntimeError as error:
                    # Where training is over rank 0, which may host the store, may have gone.
                    may_ask = False
                    logger.info("lost the store, so notices of other ranks are not seen: %s", error)

    def _agree(self, meeting: Meeting, ranks: Ranks, number: int, reason: str) -> tuple[int, str]:
        """The step at which all ranks return True, and who was told first."""

        def post() -> tuple[int, str]:
            first = reason
            if meeting.distributed:
                keys = meeting.keys(str(number))
                first = keys.compare_set("notice", "", reason).decode()
            with self._changed:
                self._posted = self._step
                self._changed.notify_all()
                return self._posted, first

        def largest(posted: list[tuple[int, str]]) -> tuple[int, str]:
            if meeting.distributed and number:
                # Where all have come from.
                meeting.keys(str(number - 1)).delete_key("notice")
            return max(step for step, _first in posted) + 1, posted[0][1]

        try:
            return ranks.all_reduce("preemption", post, largest)
        except CheckpointException as error:
            raise explained(error, _NAME, ranks.rank, self._timeout) from error


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have none
        return f"signal {number}"


def _before(number: int) -> Any:
    """The handler of a signal, past those of watches that have ended."""
    handler: Any = signal.getsignal(number)
    while isinstance(watch := getattr(handler, "__self__", None), PreemptionWatch):
        if not watch._closed:
            break
        handler = watch._before[number]
    return handler


def signal_numbers(signals: Iterable[int], option: str) -> tuple[int, ...]:
    """Checks the signals to watch.

    Args:
        signals: their numbers.
        option: the name of the option, for errors.

    Raises:
        TypeError: it is not an iterable of numbers.
        ValueError: a signal of that number does not exist, or cannot be watched.
    """
    form = f"{option} must be a list of signal numbers such as [signal.SIGTERM]"
    if isinstance(signals, str) or not isinstance(signals, Iterable):
        raise TypeError(f"{form}, got {signals!r}")
    numbers = tuple(signals)
    watchable = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    for number in numbers:
        if not isinstance(number, int):
            raise TypeError(f"{form}, but one is {number!r}")
        if number not in watchable:
            raise ValueError(f"{option}: {number!r} is not a signal that a process can watch")
    return numbers


_watches: LiveObjects[PreemptionWatch] = LiveObjects()
_by_group: WeakKeyDictionary[dist.ProcessGroup, PreemptionWatch] = WeakKeyDictionary()
_alone: list[PreemptionWatch] = []
# How many watches there have been: a new one must not find the keys of the last one.
_counts: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


def watch_for_preemption(
    signals: Iterable[int] = (signal.SIGTERM,),
    file: str | os.PathLike[str] | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    poll_seconds: float = POLL_SECONDS,
    timeout: float = TIMEOUT_SECONDS,
) -> PreemptionWatch:
    """Begins to wait for notices. Every rank of the group calls it, before its first step.

    It waits for nobody. After :meth:`PreemptionWatch.close` the group can be watched again, on all
    ranks. A signal that is watched no longer ends this process; a handler that was
    set before is called as well (not Python's own for SIGINT). Forked children get the signals as
    they were.

    Args:
        signals: numbers. Other than for none, it must be called in the main thread.
        file: a notice when it appears, on the rank that sees it. It counts again after it was
            gone; who makes it removes it, or it is a notice to the next run too.
        process_group: None for the default group.
        poll_seconds: how often the file and the store are looked at, each with one request to the
            store, by a thread.
        timeout: seconds after which a rank is given up that does not post its step after a notice.

    Raises:
        TypeError: ``signals`` are not numbers.
        ValueError: the group is watched already; not the main thread; this process is not in the
            group; a signal cannot be watched.
    """
    numbers = signal_numbers(signals, "signals")
    if numbers and threading.current_thread() is not threading.main_thread():
        raise ValueError(
            "signals can be watched from the main thread only: call watch_for_preemption there "
            "before the first step"
        )
    if current_watch(process_group) is not None:
        raise ValueError("this process group is already watched: close() that watch first")
    group = _group(process_group)
    if group is None:
        meeting = meeting_of(None, "preemption")
        watch = PreemptionWatch(meeting, numbers, file, poll_seconds, timeout, _alone.remove)
        _alone.append(watch)
    else:
        count = _counts.get(group, 0) if isinstance(group, dist.ProcessGroup) else 0
        meeting = meeting_of(process_group, f"preemption-{count}")
        known = weakref.ref(group)

        def forget(watch: PreemptionWatch) -> None:
            of = known()
            if of is not None and _by_group.get(of) is watch:
                del _by_group[of]

        watch = PreemptionWatch(meeting, numbers, file, poll_seconds, timeout, forget)
        _by_group[group] = watch
        _counts[group] = count + 1
        weakref.finalize(group, watch._group_has_gone).atexit = False
    return watch


def reached_preemption_sync_point(
    step: int, *, process_group: dist.ProcessGroup | None = None
) -> bool:
    """Whether this is the step at which all ranks are to save and stop. Call it once in each step.

    After a notice on any rank, the ranks agree on the largest step that any of them has come to,
    plus one. The call for that step returns True on every rank; where steps are not called for one
    by one, the first call for a later one. It returns True again for the same step only. Training
    that goes on afterwards may be told again.

    Until there is a notice it compares a few numbers, and asks nobody: a thread looks at the store
    once a second. Once there is one, the first call for a later step than the one that this rank's
    thread has posted waits for the other ranks' threads: for up to ``poll_seconds``.

    Without :func:`watch_for_preemption`, the first call begins to watch for SIGTERM. A rank that is
    told before that ends.

    Args:
        step: from 0 on, the same numbers on all ranks.
        process_group: None for the default group.

    Raises:
        TimeoutError: after a notice ranks did not post their step; they are named. Every later
            call raises the same.
        ConnectionError: the store was lost after a notice. Likewise.
        ValueError: ``step`` is negative; it is the first call, and not in the main thread; this
            process is not in the group.
    """
    watch = current_watch(process_group)
    if watch is None:
        watch = watch_for_preemption(process_group=process_group)
    return watch.reached(step)


def _group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.group.WORLD if process_group is None else process_group


def current_watch(process_group: dist.ProcessGroup | None) -> PreemptionWatch | None:
    """The watch of a process group, None for the default group, if there is one."""
    group = _group(process_group)
    if group is None:
        return _alone[0] if _alone else None
    # new_group does not return a group to a process that is not in it.
    return _by_group.get(group) if isinstance(group, dist.ProcessGroup) else None


def _close_all() -> None:
    # A thread that asks the store while Python ends would end with it.
    for watch in _watches:
        watch.close()


def _leave_child() -> None:
    # There the signals mean what they did: loaders end their workers by them.
    for watch in _watches:
        watch._restore_handlers()


register(Part.NOTICES, at_exit=_close_all, in_child=_leave_child)
