"""A queue of functions that run beside training and are finalized by all ranks together.

1. ``schedule_async_request`` runs the preload function, so that the sources may change, and starts
   a thread of this process for the function itself. Functions of one queue run one after the other.
2. From its first poll on, which says that the others count, a rank has a thread that agrees with
   them, over the store, that all of them have run it; or who has failed, or is dead or stuck.
3. ``maybe_finalize_async_calls`` on all ranks, each step: where all have run it, all ranks run the
   finalize functions at the same poll (ranks/lockstep.py), or raise. A rank alone asks itself.

Nothing is forked, spawned or pickled.
"""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from torch_ckpt import _C, _core
from torch_ckpt._base.live_objects import LiveObjects
from torch_ckpt._base.log import LOGGER
from torch_ckpt.megatron.call import Agreement, Call
from torch_ckpt.megatron.request import AsyncRequest, priorities, staged_arguments
from torch_ckpt.ranks.lockstep import Lockstep
from torch_ckpt.ranks.meeting import TIMEOUT_SECONDS, Meeting
from torch_ckpt.ranks.outcomes import attempt, failed
from torch_ckpt.saving.background import Background
from torch_ckpt.saving.host_memory import reserve_pool


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

    _instances: ClassVar[LiveObjects[AsyncCallsQueue]] = LiveObjects()
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
        self._calls: deque[Call] = deque()
        self._last: Call | None = None
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
            has_device = _C.has_cuda and torch.cuda.is_available()
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
        call = Call(request, meeting, self._background or self._default_background)
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
            _core.fault_point("call has ended")
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

    def _first(self) -> Call | None:
        try:
            return self._calls[0]
        except IndexError:
            return None

    def _has_ended(self, call: Call, blocking: bool, no_dist: bool) -> bool:
        if no_dist:
            if blocking:
                call.wait(self._timeout)
            return call.ended.is_set()
        if call.agreement is None:
            call.agreement = Agreement(call, self._timeout, self._lockstep)
            self._lockstep = call.agreement.lockstep
        if blocking:
            call.agreement.wait()
            return True
        return call.agreement.poll()
