"""Runs one call of a queue, and lets all ranks agree on its outcome."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torch.distributed.checkpoint.api import WRAPPED_EXCEPTION, CheckpointException

from torch_ckpt._base.exit_threads import exit_without, spawn
from torch_ckpt._base.life_cycle import LiveObjects, Part, register
from torch_ckpt.errors import CheckpointError
from torch_ckpt.megatron.request import STEP, AsyncRequest, require_same_call, stage_arguments
from torch_ckpt.megatron.write_task import tasks_in
from torch_ckpt.options import Background
from torch_ckpt.ranks.exchange import Exchange
from torch_ckpt.ranks.failures import (
    Failure,
    capture_exceptions,
    convert_torch_failure,
    drop_frames,
    failed_on,
    failure_of,
)
from torch_ckpt.ranks.group import RankGroup, own_rank
from torch_ckpt.ranks.polled_event import PolledEvent

# Longest pause between two checks for progress; a tenth of the timeout if that is shorter.
_CHECK_SECONDS = 1.0

# Maximum time for which interpreter exit waits for the other ranks to read this rank's outcome.
_EXIT_SECONDS = 70.0

_is_exiting = threading.Event()


class Call:
    """The execution of one request on this rank."""

    def __init__(
        self, request: AsyncRequest, group: RankGroup, background: Background | None
    ) -> None:
        self.request = request
        # Looked up early, because the process group may be destroyed before the call is finalized.
        self.group = group
        self.writes = tasks_in(request.async_fn_args)
        if background is not None:
            for write in self.writes:
                write.background = background
        self.ended = threading.Event()
        self.is_aborted = False
        self.failure: Failure | None = None
        self.agreement: Agreement | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self, before: Call | None) -> None:
        """Stages the request, and runs its function in a thread after the function of the previous
        call has ended. An error fails the call.

        Args:
            before: the previous call of the queue; None for the first.

        Raises:
            KeyboardInterrupt, SystemExit: raised during staging. The call fails as well.
        """
        arguments = capture_exceptions(stage_arguments, self.request)
        if isinstance(arguments, Failure):
            self._cancel(arguments)
        elif self.request.async_fn is None:
            self.complete(None)
        else:
            try:
                # Only the thread refers to the arguments.
                self._thread = spawn(partial(self._run, [arguments], before))
            except RuntimeError as error:
                self._cancel(failure_of(error))
        if isinstance(arguments, Failure) and isinstance(
            arguments.error, KeyboardInterrupt | SystemExit
        ):
            # The other ranks receive this error when the call is finalized.
            raise arguments.error

    def complete(self, failure: Failure | None) -> None:
        """Records the outcome; None means success. Only the first call has an effect."""
        with self._lock:
            if not self.ended.is_set():
                self.failure = failure
                if failure is not None:
                    # The error's frames refer to the request.
                    drop_frames(failure.error)
                # Release the function and its arguments.
                self.request = self.request._replace(
                    async_fn=None, async_fn_args=(), async_fn_kwargs={}, preload_fn=None
                )
                self.ended.set()

    def abort(self) -> None:
        """Cancels the call, which fails if it has not ended."""
        self.is_aborted = True
        failure = self.abort_failure()
        self._cancel(failure)
        if self.agreement is not None:
            self.agreement.ranks.cancel(failure)
        self.release_finalize_fns()

    def release_finalize_fns(self) -> None:
        """Releases the finalize functions, and with them the writer and its results.

        Other threads, or an error's frames, may still refer to this call.
        """
        with self._lock:
            self.request = self.request._replace(finalize_fns=[])

    def abort_failure(self) -> Failure:
        """Returns the failure of an aborted call."""
        return failure_of(
            CheckpointError(
                f"call {self.request.call_idx} was aborted on rank {own_rank()} by "
                "close(abort=True) or interpreter exit; schedule its save again"
            )
        )

    def wait(self, timeout: float) -> None:
        """Waits until the call ends. Fails it if it makes no progress for ``timeout`` seconds."""
        progress, since = self._progress(), time.monotonic()
        pause = min(_CHECK_SECONDS, timeout / 10)
        while not self.ended.wait(pause):
            if _is_exiting.is_set():
                self.complete(self.abort_failure())
            now = self._progress()
            if now != progress:
                progress, since = now, time.monotonic()
            elif time.monotonic() - since >= timeout:
                doing = [write.describe_progress() for write in self.writes]
                what = "; ".join(doing) or "its function"
                error = TimeoutError(
                    f"rank {own_rank()}: call {self.request.call_idx} made no progress for "
                    f"{timeout:g} s ({what}): check the disk and what the process is waiting for, "
                    "or allow more time with AsyncCallsQueue(timeout=...)"
                )
                self._cancel(failure_of(error))

    def finalize(self) -> Exception | None:
        """Runs the finalize functions. Returns the error of the first one that fails."""
        try:
            self.request.execute_finalize_fns(validate_matching_call_idx=False)
        except Exception as error:
            return error
        except CheckpointException as error:  # torch's error; not a subclass of Exception
            return convert_torch_failure(error)
        return None

    def failure_of_all(self, no_dist: bool) -> Exception | None:
        """Returns an error with the call's failures on all ranks (with ``no_dist``, on this rank
        only). Returns None if there are none."""
        failures: Mapping[int, WRAPPED_EXCEPTION] = {}
        if self.is_aborted:
            # An abort counts even if the function had already succeeded.
            failures = {own_rank(): self.abort_failure()}
        elif self.agreement is not None and not no_dist:
            failures = self.agreement.failures()
        elif self.failure is not None:
            failures = {own_rank(): self.failure}
        return failed_on(STEP, failures) if failures else None

    # --- private ---------------------------------------------------------------------------------

    def _run(self, staged: list[Any], before: Call | None) -> None:
        """Runs the function; the body of the thread."""
        if before is not None:
            before.ended.wait()
        outcome = capture_exceptions(self._call_function, staged.pop())
        self.complete(outcome if isinstance(outcome, Failure) else None)

    def _call_function(self, arguments: list[Any]) -> None:
        request = self.request
        if request.async_fn is not None:  # None: cancelled before it started
            request.async_fn(*arguments, **request.async_fn_kwargs)

    def _cancel(self, failure: Failure) -> None:
        """Ends the call with a failure, and cancels its writes, whose files are deleted. A caller's
        own function keeps running, but interpreter exit does not wait for it."""
        self.complete(failure)
        for write in self.writes:
            write.cancel()
        if self._thread is not None:
            exit_without(self._thread)

    def _progress(self) -> tuple[int, int]:
        """Returns a value that changes as long as the call makes progress."""
        written = sum(write.moved() for write in self.writes)
        return _read_processor_time(self._thread), written


class Agreement:
    """Exchanges the outcome of one call between all ranks, in a thread.

    Args:
        call: the call.
        timeout: seconds without progress or heartbeat after which a rank is declared dead.
        before: the event of the previous call; None for the first.
    """

    # Agreements whose exchange has not ended.
    _under_way: ClassVar[LiveObjects[Agreement]] = LiveObjects()

    def __init__(self, call: Call, timeout: float, before: PolledEvent | None) -> None:
        self._call = call
        self._timeout = timeout
        self._before = before
        self.ranks = Exchange.open(call.group, "call", timeout)
        self.event = PolledEvent(call.group, timeout)
        self._lost: Mapping[int, WRAPPED_EXCEPTION] = {}
        self._failures: Mapping[int, WRAPPED_EXCEPTION] = {}
        self._is_cut_off = False  # this rank failed to exchange the outcome with the others
        self._is_done = threading.Event()
        self._under_way.add(self)
        self._thread = threading.Thread(target=self._agree, name="torch_ckpt call", daemon=True)
        self._thread.start()

    def poll(self) -> bool:
        """Returns True if this rank must finalize now. All ranks do so at the same poll."""
        if self.ranks.size == 1:
            return self._call.ended.is_set()
        try:
            return self.event.poll(self._acts_independently)
        except CheckpointException as error:
            self._lost = error.failures
            return True

    def wait(self) -> None:
        """Waits until the call has ended on all ranks, a rank is declared dead, or the call is
        aborted."""
        self.ranks.wake()
        # Python handles Ctrl-C only between waits.
        while not (self._call.is_aborted or self._is_done.wait(_CHECK_SECONDS)):
            pass

    def failures(self) -> Mapping[int, WRAPPED_EXCEPTION]:
        """Waits for the outcome. Returns the failures by rank."""
        if not self._lost:
            self.wait()
            self.event.release_store()
            self._is_done.wait()
        return self._lost or self._failures

    @classmethod
    def end_all(cls) -> None:
        """Ends all exchanges when the interpreter exits.

        A thread that uses the store later would crash the process. Waits until the other ranks have
        read the outcomes that are already decided.
        """
        _is_exiting.set()
        for agreement in cls._under_way:
            if not agreement._is_done.is_set():
                agreement.ranks.cancel(agreement._call.abort_failure())
        for agreement in cls._under_way:
            agreement._thread.join(_EXIT_SECONDS)

    # --- private ---------------------------------------------------------------------------------

    def _agree(self) -> None:
        try:
            # Send heartbeats as long as the process is alive, even without progress:
            # _wait_for_own_part() detects a lack of progress.
            with self.ranks.alive(time.monotonic_ns):
                self._failures, _ = self.ranks.exchange(STEP, self._wait_for_own_part, _combine)
        except CheckpointException as error:
            self._failures = error.failures
            self._is_cut_off = self.ranks.rank in error.failures
        except BaseException as error:
            self._failures = {self.ranks.rank: failure_of(error)}
            self._is_cut_off = True
        self.event.stop_waiting()
        self._is_done.set()
        self.ranks.close()
        if self._before is not None and not self._failures:
            # All ranks have ended this call, so they have acted on the previous call.
            with suppress(CheckpointException):
                self._before.delete_keys()
        self._before = None
        self._under_way.discard(self)

    def _wait_for_own_part(self) -> tuple[tuple[int, list[Failure]], None]:
        """Waits for the call on this rank. Returns the call's number and, if the call failed, its
        failure."""
        self._call.wait(self._timeout)
        failure = self._call.failure
        if failure is not None and self._call.is_aborted:
            # The call may have been aborted before this agreement existed.
            self.ranks.cancel(failure)
        if self.ranks.size > 1:
            self.event.report_part()
        # A list, because a wrapped exception would fail the exchange itself.
        return (self._call.request.call_idx, [failure] if failure else []), None

    def _acts_independently(self) -> bool:
        """Returns True if this rank no longer acts together with the others."""
        return self._is_cut_off or self._call.is_aborted


def _combine(parts: list[tuple[int, list[Failure]]]) -> dict[int, Failure]:
    """Returns the failures by rank. Does not raise: the error must reach all ranks at the same
    poll."""
    failures = {rank: failure[0] for rank, (_idx, failure) in enumerate(parts) if failure}
    same = capture_exceptions(require_same_call, [idx for idx, _failure in parts])
    return {0: same} if isinstance(same, Failure) and not failures else failures


def _read_processor_time(thread: threading.Thread | None) -> int:
    """Returns the processor time of a thread, in hundredths of a second; 0 if it has ended."""
    # pthread_getcpuclockid is undefined for a thread that has ended.
    if thread is None or thread.native_id is None:
        return 0
    try:
        nanoseconds = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]
    except OSError:
        return 0
    return int(nanoseconds) // 10_000_000


register(Part.CALLS, at_exit=Agreement.end_all)
