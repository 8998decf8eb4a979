"""A queue of functions that run beside training and are finalized by all ranks together.

1. ``schedule_async_request`` runs the preload function, so that the sources may change, and starts
   a thread of this process for the function itself. Functions of one queue run one after the other.
2. From its first poll on, which says that the others count, a rank has a thread that agrees with
   them, over the store, that all of them have run it; or who has failed, or is dead or stuck.
3. ``maybe_finalize_async_calls`` on all ranks, each step: where all have run it, all ranks run the
   finalize functions at the same poll (lockstep.py), or raise. A rank alone asks itself.

Nothing is forked, spawned or pickled.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import WRAPPED_EXCEPTION, CheckpointException

from torch_ckpt import _C
from torch_ckpt.background import Background
from torch_ckpt.coordination import (
    TIMEOUT_SECONDS,
    Meeting,
    attempt,
    drop_frames,
    failed,
    own_rank,
)
from torch_ckpt.errors import CheckpointError
from torch_ckpt.failures import failed_on, of_torch
from torch_ckpt.host_memory import reserve_pool
from torch_ckpt.lockstep import Lockstep
from torch_ckpt.metrics import LOGGER
from torch_ckpt.replacing import received_request
from torch_ckpt.snapshot import let_go, spawn
from torch_ckpt.staged import Stage

_STEP = "write"

# How often it is looked whether a function moves, at most; or ten times in a short timeout.
_LOOK_SECONDS = 1.0

# How long the interpreter's end waits for the other ranks to hear of this one's.
_LEAVE_SECONDS = 70.0

_leaving = threading.Event()

#: Where the caller waits for the end, its threads need not be quiet.
_LOUD = Background(nice=0, idle_io=False)


class AsyncRequest(NamedTuple):
    """What is to run beside training, with the fields of Megatron-core's class of this name.

    Attributes:
        async_fn: the function; None where this rank has nothing to do.
        async_fn_args: its arguments; with a ``preload_fn`` the second of them is replaced by what
            that returns.
        finalize_fns: to call on all ranks after ``async_fn`` has run on all ranks.
        async_fn_kwargs: its keyword arguments.
        preload_fn: called when the request is scheduled, while training waits.
        is_frozen: no finalize function may be added.
        call_idx: the number that the queue gave it.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: Sequence[Any]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: dict[str, Any] = {}  # noqa: RUF012  (a tuple's default, never changed)
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return received_request, tuple(self)

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Adds a function, to be called after those that are there.

        Raises:
            RuntimeError: the request is frozen.
        """
        if self.is_frozen:
            raise RuntimeError("Cannot add finalization functions to a frozen AsyncRequest")
        self.finalize_fns.append(fn)

    def freeze(self) -> AsyncRequest:
        """The same request, frozen."""
        return self._replace(is_frozen=True)

    def execute_sync(self) -> None:
        """Runs it here, on all ranks, up to the finalize functions.

        Raises:
            CheckpointException: on every rank, with the cause of each rank that failed.
        """

        def run() -> None:
            with Stage(_LOUD):
                arguments = staged_arguments(self)
            if self.async_fn is not None:
                self.async_fn(*arguments, **self.async_fn_kwargs)

        ranks = Meeting.of(None, no_dist=False).ranks(kind="sync")
        try:
            # No timeout: each rank is as alive as its process.
            with ranks.alive(time.monotonic_ns):
                ranks.all_reduce(_STEP, run, lambda _: None, lambda _: None)
        finally:
            spawn(ranks.close)
        self.execute_finalize_fns(validate_matching_call_idx=False)

    def execute_finalize_fns(self, validate_matching_call_idx: bool = True) -> int:
        """Calls the finalize functions.

        Args:
            validate_matching_call_idx: compare ``call_idx`` on all ranks first.

        Returns:
            ``call_idx``.

        Raises:
            CheckpointException: ranks finalize different calls; on every rank.
        """
        if validate_matching_call_idx:
            ranks = Meeting.of(None, no_dist=False).ranks(kind="call_idx")
            try:
                ranks.all_reduce("finalize", lambda: self.call_idx, _check_same, lambda _: None)
            finally:
                spawn(ranks.close)
        for finalize in self.finalize_fns:
            finalize()
        return self.call_idx


def staged_arguments(request: AsyncRequest) -> list[Any]:
    """The function's arguments, with what the preload function returns in its place.

    Raises:
        ValueError: there is no place for it.
    """
    arguments = list(request.async_fn_args)
    if request.preload_fn is not None and request.async_fn is not None:
        if len(arguments) < 2:
            raise ValueError(
                "a request with a preload_fn has at least two arguments, of which the second is "
                f"what it returns; got {len(arguments)}"
            )
        arguments[1] = request.preload_fn()
    return arguments


def priorities(cpu_priority: int, io_priority: int | None) -> Background:
    """How threads behave, from a nice value and an I/O scheduling class; None: idle."""
    return Background(nice=cpu_priority, idle_io=io_priority is None or io_priority == 3)


class AsyncCallsQueue:
    """Runs requests beside training and finalizes them on all ranks, in the order of scheduling.

    Every rank makes the same calls in the same order, with ``no_dist`` perhaps none.

    Args:
        persistent: accepted as Megatron's; there is no worker process either way.
        process_group: the ranks; the default group if None.
        timeout: in seconds: a rank whose function does not move for so long, or whose process gives
            no sign of life, is given up on all ranks. Bytes written move a function, and so
            does processor time of its thread.
        background: how the engine's threads behave for what is scheduled here; None: as
            ``warmup_persistent_caller`` said, else as each writer says.
    """

    _instances: ClassVar[weakref.WeakSet[AsyncCallsQueue]] = weakref.WeakSet()
    _default_background: ClassVar[Background | None] = None

    def __init__(
        self,
        persistent: bool = False,
        *,
        process_group: dist.ProcessGroup | None = None,
        timeout: float = TIMEOUT_SECONDS,
        background: Background | None = None,
    ) -> None:
        self.persistent = persistent
        self.call_idx = -1
        self._group = process_group
        self._timeout = timeout
        self._background = background
        self._calls: deque[_Call] = deque()
        self._last: _Call | None = None
        self._lockstep: Lockstep | None = None
        self._pid = os.getpid()
        self._instances.add(self)

    @classmethod
    def warmup_persistent_caller(
        cls,
        rank: int = 0,
        mp_mode: str = "spawn",
        cpu_priority: int = 10,
        io_priority: int | None = None,
        *,
        reserve_bytes: int = 0,
        **_others: Any,
    ) -> None:
        """Says how the engine's threads behave; there is no process to start.

        Args:
            rank: accepted as Megatron's, and so are ``mp_mode`` and what else it knows.
            cpu_priority: their nice value, 0 to 19.
            io_priority: their I/O scheduling class: 3 is idle; None: idle, too.
            reserve_bytes: of this rank's part of the state: memory for it is made quietly from now
                on, so that the first save need not wait for it; see ``torch_ckpt.reserve_pool``.
        """
        cls._default_background = priorities(cpu_priority, io_priority)
        if reserve_bytes > 0:
            has_device = torch.cuda.is_available()
            device = torch.cuda.current_device() if has_device else None
            reserve_pool(reserve_bytes, device=device, wait=False)

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Stages a request and starts its function; returns when its sources may change.

        What fails here fails the call: all ranks hear of it when it is finalized.

        Returns:
            The number of the call, from 0.

        Raises:
            KeyboardInterrupt, SystemExit: while it was staged; the call has failed then, too.
        """
        self.call_idx += 1
        # Older classes, and those of others, have fewer fields or other methods.
        known = {f: v for f, v in async_request._asdict().items() if f in AsyncRequest._fields}
        request = AsyncRequest(**known)._replace(is_frozen=True, call_idx=self.call_idx)
        meeting = Meeting.of(self._group, no_dist=False)
        call = _Call(request, meeting, self._background or self._default_background)
        self._calls.append(call)
        with call.stage:
            outcome = attempt(staged_arguments, request)
        call.start(outcome, self._last)
        if call.is_aborted:
            # Meanwhile, by another thread, which did not know of all its writes.
            call.abort()
        elif call.ended.is_set() and call.failure is not None:
            call.cancel_writes()
        self._last = call
        if failed(outcome) and isinstance(outcome[0], KeyboardInterrupt | SystemExit):
            # The others hear of it at the end, the caller now.
            raise outcome[0]
        return self.call_idx

    def maybe_finalize_async_calls(
        self, blocking: bool = False, no_dist: bool = False
    ) -> list[int]:
        """Finalizes the calls that have ended on all ranks; every rank calls it, in step.

        A poll that does not wait talks to the store at most, never to a device or a process group.

        Args:
            blocking: wait for all calls, and finalize all that have not failed.
            no_dist: finalize what has ended on this rank.

        Returns:
            The numbers of the calls that were finalized.

        Raises:
            CheckpointException: on every rank: a function failed somewhere, with the cause of each
                rank; or ranks finalize different calls. The call is not finalized, and is gone.
            BaseException: what a finalize function raises. The call is gone.

        Of several errors the first is raised, at the end; the others are logged.
        """
        finalized: list[int] = []
        raised: Exception | None = None
        failure: Exception | None = None
        error: Exception | None = None
        while (call := self._first()) is not None:
            if not self._has_ended(call, blocking, no_dist):
                break
            _C.fault_point("call has ended")
            with suppress(ValueError):  # aborted by another thread
                self._calls.remove(call)
            if self._last is call:
                self._last = None
            failure = call.failure_of_all(no_dist)
            error = failure or call.finalize()
            # It is in a cycle with its agreement, and the writer must not wait for the collector.
            call.discard()
            if error is None:
                finalized.append(call.request.call_idx)
                continue
            if raised is not None:
                LOGGER.error("call %d was not finalized: %s", call.request.call_idx, error)
            raised = raised or error
            if failure is None:
                # Perhaps on this rank alone: the others go on with the next call in this poll.
                continue
            if call.is_aborted or not blocking:
                # An abort takes the calls after it, too.
                break
        if raised is not None:
            try:
                raise raised
            finally:
                # Or the error would hold the frame that holds it, and with it the callers'.
                del raised, failure, error
        return finalized

    def get_num_unfinalized_calls(self) -> int:
        """How many calls have not been finalized."""
        return len(self._calls)

    def close(self, abort: bool = False) -> None:
        """Ends the queue, which may be used again.

        Args:
            abort: do not wait and do not finalize: what is being written is cancelled and its files
                are removed; functions that are not ours are left to run. From any thread, and on
                all ranks, wherever each of them is.

        Raises:
            CheckpointException: see :meth:`maybe_finalize_async_calls`.
        """
        if not abort:
            self.maybe_finalize_async_calls(blocking=True)
            return
        while (aborted := self._first()) is not None:
            # Another thread may finalize it just now.
            with suppress(ValueError):
                self._calls.remove(aborted)
                aborted.abort()
                LOGGER.warning("call %d was aborted", aborted.request.call_idx)
        self._last = None
        self._lockstep = None
        with suppress(ValueError):  # not in the group
            Meeting.of(self._group, no_dist=False).start_over()

    def __del__(self) -> None:
        calls = getattr(self, "_calls", None)
        if calls and self._pid == os.getpid():
            LOGGER.error(
                "%d async calls were never finalized, so what they saved is not committed; call "
                "close() or maybe_finalize_async_calls(blocking=True) on all ranks",
                len(calls),
            )

    # --- private ---------------------------------------------------------------------------------

    def _first(self) -> _Call | None:
        try:
            return self._calls[0]
        except IndexError:
            return None

    def _has_ended(self, call: _Call, blocking: bool, no_dist: bool) -> bool:
        if no_dist:
            if blocking:
                call.wait(self._timeout)
            return call.ended.is_set()
        if call.agreement is None:
            call.agreement = _Agreement(call, self._timeout, self._lockstep)
            self._lockstep = call.agreement.lockstep
        if blocking:
            call.agreement.wait()
            return True
        return call.agreement.poll()


class _Call:
    """One request on this rank."""

    def __init__(
        self, request: AsyncRequest, meeting: Meeting, background: Background | None
    ) -> None:
        self.request = request
        # Of now: the process group may be gone when the call is finalized.
        self.meeting = meeting
        self.stage = Stage(background)
        self.ended = threading.Event()
        self.is_aborted = False
        self.failure: WRAPPED_EXCEPTION | None = None
        self.agreement: _Agreement | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self, staged: Any, before: _Call | None) -> None:
        """Runs the function in a thread, after that of the call before.

        Args:
            staged: the arguments, or why there are none.
        """
        if failed(staged):
            self.end(staged)
        elif self.request.async_fn is None:
            self.end(None)
        else:
            arguments = [staged]

            def run() -> None:
                if before is not None:
                    before.ended.wait()
                outcome = attempt(self._run, arguments.pop())
                self.end(outcome if failed(outcome) else None)

            try:
                self._thread = spawn(run)
            except RuntimeError as error:
                self.end(attempt(_raise, error))

    def end(self, failure: WRAPPED_EXCEPTION | None) -> None:
        """The first to call it decides."""
        with self._lock:
            if not self.ended.is_set():
                self.failure = failure
                if failure is not None:
                    # Whoever keeps the error would keep the request by its frames.
                    drop_frames(failure[0])
                # Whatever the request holds for its function may go.
                self.request = self.request._replace(
                    async_fn=None, async_fn_args=(), async_fn_kwargs={}, preload_fn=None
                )
                self.ended.set()

    def abort(self, failure: WRAPPED_EXCEPTION | None = None) -> None:
        """Fails it, unless it has ended."""
        self.is_aborted = True
        failure = failure or self.aborted()
        self._give_up(failure)
        if self.agreement is not None:
            self.agreement.cancel(failure)
        self.discard()

    def cancel_writes(self) -> None:
        """Those that have been begun; they then leave no files."""
        for write in list(self.stage.writes):
            write.cancel()

    def discard(self) -> None:
        """Lets the finalize functions go, and with them the writer and what it has written.

        Others may have the call, or an error with its frames, for some time.
        """
        with self._lock:
            self.request = self.request._replace(finalize_fns=[])

    def aborted(self) -> WRAPPED_EXCEPTION:
        """Why it is not finalized once it was aborted."""
        error = CheckpointError(f"call {self.request.call_idx} was aborted")
        wrapped: WRAPPED_EXCEPTION = attempt(_raise, error)
        return wrapped

    def wait(self, timeout: float) -> None:
        """Waits for the end; fails the call where it does not move for ``timeout`` seconds."""
        moved, since = self._moved(), time.monotonic()
        rest = min(_LOOK_SECONDS, timeout / 10)
        while not self.ended.wait(rest):
            if _leaving.is_set():
                self.end(self.aborted())
            now = self._moved()
            if now != moved:
                moved, since = now, time.monotonic()
            elif time.monotonic() - since >= timeout:
                what = "; ".join(write.state() for write in self.stage.writes) or "its function"
                error = TimeoutError(
                    f"rank {own_rank()}: call {self.request.call_idx} has not moved for "
                    f"{timeout:g} s ({what}): look at the disk and at what the process waits for, "
                    "or allow more time: AsyncCallsQueue(timeout=...)"
                )
                self._give_up(attempt(_raise, error))

    def finalize(self) -> Exception | None:
        """Runs the finalize functions; returns what one of them raises."""
        try:
            self.request.execute_finalize_fns(validate_matching_call_idx=False)
        except Exception as error:
            return error
        except CheckpointException as error:  # from dcp or from Megatron, which is no Exception
            return of_torch(error)
        return None

    def failure_of_all(self, no_dist: bool) -> Exception | None:
        """Why it failed, on all ranks or on this one."""
        failures: dict[int, WRAPPED_EXCEPTION] = {}
        if self.is_aborted:
            # Perhaps when it had ended well.
            failures = {own_rank(): self.aborted()}
        elif self.agreement is not None and not no_dist:
            failures = self.agreement.failures()
        elif self.failure is not None:
            failures = {own_rank(): self.failure}
        return failed_on(_STEP, failures) if failures else None

    # --- private ---------------------------------------------------------------------------------

    def _run(self, arguments: list[Any]) -> None:
        request = self.request
        if request.async_fn is not None:  # it has been given up
            with Stage(self.stage.background, self.stage.writes):
                request.async_fn(*arguments, **request.async_fn_kwargs)

    def _give_up(self, failure: WRAPPED_EXCEPTION) -> None:
        """Ends what has not ended; a function that is not ours runs on, and nobody waits for it."""
        self.end(failure)
        self.cancel_writes()
        if self._thread is not None:
            let_go(self._thread)

    def _moved(self) -> tuple[int, int]:
        """Changes for as long as anything moves."""
        return _processor_time(self._thread), sum(write.moved() for write in self.stage.writes)


@dataclasses.dataclass
class _Agreed:
    """What all ranks know of a call that has ended."""

    failures: dict[int, WRAPPED_EXCEPTION]
    is_alone: bool = False  # this rank is lost to the others


class _Agreement:
    """How one call ends on all ranks."""

    # That have not come to their end.
    _under_way: ClassVar[weakref.WeakSet[_Agreement]] = weakref.WeakSet()

    def __init__(self, call: _Call, timeout: float, before: Lockstep | None) -> None:
        self._call = call
        self._timeout = timeout
        self._before = before
        self._ranks = call.meeting.ranks(timeout, kind="call")
        self.lockstep = Lockstep(call.meeting, timeout)
        self._lost: dict[int, WRAPPED_EXCEPTION] = {}
        self._result: Future[_Agreed] = Future()
        self._under_way.add(self)
        self._thread = threading.Thread(target=self._agree, name="torch_ckpt call", daemon=True)
        self._thread.start()

    def cancel(self, failure: WRAPPED_EXCEPTION) -> None:
        """Waits for no rank any more."""
        self._ranks.cancel(failure)

    def poll(self) -> bool:
        """Whether to finalize now, as all ranks do."""
        if self._ranks.size == 1:
            return self._call.ended.is_set()
        try:
            return self.lockstep.poll(self._is_alone)
        except CheckpointException as error:
            self._lost = error.failures
            return True

    def wait(self) -> None:
        """Until the call has ended on all ranks, or somebody was given up, or it was aborted."""
        self._ranks.hurry()
        while not self._call.is_aborted:
            # Waking up lets Ctrl-C in.
            try:
                self._result.result(_LOOK_SECONDS)
                return
            except FutureTimeout:
                continue

    def failures(self) -> dict[int, WRAPPED_EXCEPTION]:
        """By rank, why the call failed."""
        if self._lost:
            return self._lost
        self.wait()
        self.lockstep.rest()
        return self._result.result().failures

    @classmethod
    def leave(cls) -> None:
        """At the interpreter's end, which would end the process if a thread used the store then.

        Those that have agreed are waited for until the others have heard of it, too.
        """
        _leaving.set()
        for agreement in list(cls._under_way):
            if not agreement._result.done():
                agreement.cancel(agreement._call.aborted())
        for agreement in list(cls._under_way):
            agreement._thread.join(_LEAVE_SECONDS)

    # --- private ---------------------------------------------------------------------------------

    def _agree(self) -> None:
        try:
            # The process lives; that the function moves is looked after here.
            with self._ranks.alive(time.monotonic_ns):
                agreed = self._ranks.all_reduce(_STEP, self._mine, _combined, lambda _: None)
        except CheckpointException as error:
            agreed = _Agreed(error.failures, self._ranks.rank in error.failures)
        except BaseException as error:
            agreed = _Agreed({self._ranks.rank: attempt(_raise, error)}, True)
        self.lockstep.over()
        self._result.set_result(agreed)
        self._ranks.close()
        if self._before is not None and not agreed.failures:
            # All ranks have come here, and so they have acted on the call before.
            with suppress(CheckpointException):
                self._before.end()
        self._before = None
        self._under_way.discard(self)

    def _mine(self) -> tuple[int, list[WRAPPED_EXCEPTION]]:
        self._call.wait(self._timeout)
        failure = self._call.failure
        if failure is not None and self._call.is_aborted:
            # Perhaps before there was this agreement.
            self._ranks.cancel(failure)
        if self._ranks.size > 1:
            self.lockstep.part()
        # In a list, so that it is not taken for a failure of this step.
        return self._call.request.call_idx, [failure] if failure else []

    def _is_alone(self) -> bool:
        """Whether the others do not count any more."""
        has_lost = self._result.done() and self._result.result().is_alone
        return has_lost or self._call.is_aborted


def _combined(mine: list[tuple[int, list[WRAPPED_EXCEPTION]]]) -> _Agreed:
    failures = {rank: found[0] for rank, (_idx, found) in enumerate(mine) if found}
    if not failures:
        # Not raised: the ranks are to hear of it at the same poll.
        same = attempt(_check_same, [idx for idx, _failure in mine])
        failures = {0: same} if failed(same) else {}
    return _Agreed(failures)


def _check_same(indices: list[int]) -> None:
    if len(set(indices)) > 1:
        of_ranks = ", ".join(f"rank {rank} call {idx}" for rank, idx in enumerate(indices))
        raise CheckpointError(
            f"Unmatched async calls: {of_ranks}. Every rank must schedule and finalize every call"
        )


def _processor_time(thread: threading.Thread | None) -> int:
    """Of a thread, in hundredths of a second; 0 where it has none any more."""
    # Not by its clock: to ask for the clock of a thread that ends is undefined.
    if thread is None or thread.native_id is None:
        return 0
    try:
        nanoseconds = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]
    except OSError:
        return 0
    return int(nanoseconds) // 10_000_000


def _raise(error: BaseException) -> None:
    raise error


# Before torch_ckpt's own, and so before the engine's threads are joined.
atexit.register(_Agreement.leave)
