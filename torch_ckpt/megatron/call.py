"""One call of a queue: it runs, and the ranks agree on its end."""

from __future__ import annotations

import dataclasses
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from torch.distributed.checkpoint.api import WRAPPED_EXCEPTION, CheckpointException

from torch_ckpt._base.life_cycle import Part, register
from torch_ckpt._base.live_objects import LiveObjects
from torch_ckpt.errors import CheckpointError
from torch_ckpt.megatron.request import STEP, AsyncRequest, check_same
from torch_ckpt.megatron.write_task import Stage
from torch_ckpt.ranks.failures import failed_on, of_torch
from torch_ckpt.ranks.lockstep import Lockstep
from torch_ckpt.ranks.meeting import Meeting, own_rank
from torch_ckpt.ranks.outcomes import attempt, drop_frames, failed
from torch_ckpt.saving.background import Background
from torch_ckpt.saving.running_saves import let_go, spawn

# How often it is looked whether a function moves, at most; or ten times in a short timeout.
_LOOK_SECONDS = 1.0

# How long the interpreter's end waits for the other ranks to hear of this one's.
_LEAVE_SECONDS = 70.0

_leaving = threading.Event()


class Call:
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
        self.agreement: Agreement | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self, staged: Any, before: Call | None) -> None:
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
                self.end(_wrapped(error))

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
        return _wrapped(CheckpointError(f"call {self.request.call_idx} was aborted"))

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
                self._give_up(_wrapped(error))

    def finalize(self) -> Exception | None:
        """Runs the finalize functions; returns what one of them raises."""
        try:
            self.request.execute_finalize_fns(validate_matching_call_idx=False)
        except Exception as error:
            return error
        except CheckpointException as error:  # from dcp or from Megatron, which is not an Exception
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
        return failed_on(STEP, failures) if failures else None

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


class Agreement:
    """How one call ends on all ranks."""

    # That have not come to their end.
    _under_way: ClassVar[LiveObjects[Agreement]] = LiveObjects()

    def __init__(self, call: Call, timeout: float, before: Lockstep | None) -> None:
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
        for agreement in cls._under_way:
            if not agreement._result.done():
                agreement.cancel(agreement._call.aborted())
        for agreement in cls._under_way:
            agreement._thread.join(_LEAVE_SECONDS)

    # --- private ---------------------------------------------------------------------------------

    def _agree(self) -> None:
        try:
            # The process lives; that the function moves is looked after here.
            with self._ranks.alive(time.monotonic_ns):
                agreed = self._ranks.all_reduce(STEP, self._mine, _combined)
        except CheckpointException as error:
            agreed = _Agreed(error.failures, self._ranks.rank in error.failures)
        except BaseException as error:
            agreed = _Agreed({self._ranks.rank: _wrapped(error)}, True)
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
        same = attempt(check_same, [idx for idx, _failure in mine])
        failures = {0: same} if failed(same) else {}
    return _Agreed(failures)


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


def _wrapped(error: BaseException) -> WRAPPED_EXCEPTION:
    def fail() -> None:
        raise error

    wrapped: WRAPPED_EXCEPTION = attempt(fail)
    return wrapped


register(Part.CALLS, at_exit=Agreement.leave)
