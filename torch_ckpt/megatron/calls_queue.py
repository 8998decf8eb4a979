"""A queue of functions that run in the background and are finalized on all ranks together.

1. ``schedule_async_request`` runs the preload function, and starts a thread of this process for the
   function itself. The sources may change once the preload function has returned. The functions of
   a queue run one after another.
2. The first poll on a rank starts a thread that exchanges the outcome with the other ranks through
   the store: whether the function has ended on all ranks, and which ranks have failed or died.
3. All ranks call ``maybe_finalize_async_calls`` in each step. Once the function has ended on all
   ranks, all of them run the finalize functions or raise an error, at the same poll
   (ranks/polled_event.py).

Nothing is forked, spawned or pickled.
"""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from typing import ClassVar

import torch
import torch.distributed as dist

from torch_ckpt import _C, _core
from torch_ckpt._base.life_cycle import LiveObjects
from torch_ckpt._base.log import LOGGER
from torch_ckpt.megatron.call import Agreement, Call
from torch_ckpt.megatron.request import AsyncRequest, make_background
from torch_ckpt.options import Background
from torch_ckpt.ranks.group import TIMEOUT_SECONDS, RankGroup, own_rank
from torch_ckpt.ranks.polled_event import PolledEvent
from torch_ckpt.saving import host_memory


class AsyncCallsQueue:
    """Runs requests in the background and finalizes them on all ranks, in scheduling order.

    All ranks must make the same calls in the same order. Exception: calls with ``no_dist``.

    Args:
        persistent: accepted for compatibility with Megatron, but ignored; no worker process is ever
            started.
        process_group: the ranks; None means the default group.
        timeout: a call fails on all ranks if, for this many seconds, a rank sends no heartbeat or a
            rank's function makes no progress. A function makes progress as long as it writes bytes
            or its thread uses processor time.
        background: priorities of the engine's threads for the writes of this queue. None means the
            priorities set by ``warmup_persistent_caller`` or, if no priorities were set, each
            writer's own priorities.

    Examples:
        ```python
        queue = torch_ckpt.megatron.AsyncCallsQueue(persistent=True, timeout=600)
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls()  # on all ranks, in each step
        queue.close()  # before the program ends: waits, and finalizes
        ```
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
        self._event: PolledEvent | None = None
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
        **_others: object,
    ) -> None:
        """Sets the priorities of the engine's threads. Starts no process.

        Args:
            rank: accepted for compatibility with Megatron, but ignored, like ``mp_mode`` and any
                other keyword.
            cpu_priority: niceness of the threads, 0 to 19.
            io_priority: I/O scheduling class of the threads: None or 3 for idle; any other number
                keeps the class of the process.
            reserve_bytes: size of this rank's part of the state, in bytes. Memory for a snapshot of
                that part is reserved in the background; the first save then does not have to wait
                for the allocation. See :func:`torch_ckpt.reserve_pool`.

        Raises:
            ValueError: ``cpu_priority`` is out of range.
        """
        cls._default_background = make_background(cpu_priority, io_priority)
        if reserve_bytes > 0:
            has_device = _C.has_cuda and torch.cuda.is_available()
            device = torch.cuda.current_device() if has_device else None
            host_memory.reserve.make_or_log(reserve_bytes, device)

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Stages a request and starts its function. Returns as soon as the tensors being saved can
        safely be modified.

        Errors are not raised here. Instead, the call fails on all ranks when it is finalized.

        Returns:
            The call's number; the queue's first call has the number 0.

        Raises:
            KeyboardInterrupt, SystemExit: raised during staging or by the preload function. The
                call fails as well.
        """
        self.call_idx += 1
        # Megatron's own classes, and older versions of them, have other fields or methods.
        known = {f: v for f, v in async_request._asdict().items() if f in AsyncRequest._fields}
        request = AsyncRequest(**known)._replace(is_frozen=True, call_idx=self.call_idx)
        group = RankGroup.of(self._group)
        call = Call(request, group, self._background or self._default_background)
        # A call that was removed has ended or was aborted, so its function is not waited for.
        before = self._call_at(-1)
        self._calls.append(call)
        call.start(before)
        return self.call_idx

    def maybe_finalize_async_calls(
        self, blocking: bool = False, no_dist: bool = False
    ) -> list[int]:
        """Finalizes the calls that have ended on all ranks. All ranks must call this method the
        same number of times.

        Without ``blocking``, the method uses neither a device nor a collective of the process
        group. If several calls fail, the first error is raised after all calls have been handled.
        The other errors are logged.

        Args:
            blocking: wait until all calls have ended, and finalize the calls that succeeded.
            no_dist: finalize the calls that have ended on this rank, without asking other ranks.

        Returns:
            The numbers of the finalized calls.

        Raises:
            CheckpointException: a function failed, or the ranks finalize different calls; raised on
                every rank with the cause from each failed rank. The call is removed from the queue
                without being finalized.
            BaseException: a finalize function raised this error. The call is removed from the
                queue.

        Examples:
            ```python
            for step in range(steps):
                train_one_step()
                queue.maybe_finalize_async_calls()
            queue.maybe_finalize_async_calls(blocking=True)
            ```
        """
        finalized: list[int] = []
        raised: Exception | None = None
        failure: Exception | None = None
        error: Exception | None = None
        while (call := self._call_at(0)) is not None and self._has_ended(call, blocking, no_dist):
            _core.fault_point("call has ended")
            with suppress(ValueError):  # aborted by another thread
                self._calls.remove(call)
            failure = call.failure_of_all(no_dist)
            error = failure or call.finalize()
            # The call is in a reference cycle. Release the writer before the cycle is collected.
            call.release_finalize_fns()
            number = call.request.call_idx
            if error is None:
                finalized.append(number)
            elif raised is None:
                raised = error
            else:
                LOGGER.error("rank %d: call %d was not finalized: %s", own_rank(), number, error)
            # If a finalize function has failed, then perhaps on this rank only, so continue with
            # the next call in this poll, as the other ranks do. An abort removes the later calls.
            if failure is not None and (call.is_aborted or not blocking):
                break
        if raised is not None:
            try:
                raise raised
            finally:
                # Break the cycle between the error and this frame, which refers to the callers'
                # frames.
                del raised, failure, error
        return finalized

    def get_num_unfinalized_calls(self) -> int:
        """Returns the number of calls that have not been finalized."""
        return len(self._calls)

    def close(self, abort: bool = False) -> None:
        """Waits for all calls and finalizes them. The queue can be used again afterwards.

        Args:
            abort: cancel the calls instead of waiting for them. Running writes are cancelled, their
                files are deleted, and no call is finalized. If a request runs a function of your
                own, that function keeps running. Any thread can abort the calls. All ranks must
                abort the same number of times, but not necessarily at the same time.

        Raises:
            CheckpointException: see :meth:`maybe_finalize_async_calls`.
        """
        if not abort:
            self.maybe_finalize_async_calls(blocking=True)
            return
        while (aborted := self._call_at(0)) is not None:
            # Another thread may be finalizing the call.
            with suppress(ValueError):
                self._calls.remove(aborted)
                aborted.abort()
                LOGGER.warning("rank %d: call %d was aborted", own_rank(), aborted.request.call_idx)
        self._event = None
        with suppress(ValueError):  # this rank is not in the group
            RankGroup.of(self._group).restart_numbering()

    def __del__(self) -> None:
        calls = getattr(self, "_calls", None)
        if calls and self._pid == os.getpid():
            LOGGER.error(
                "%d async calls were never finalized, so their saves were not committed; call "
                "close() or maybe_finalize_async_calls(blocking=True) on all ranks",
                len(calls),
            )

    # --- private ---------------------------------------------------------------------------------

    def _call_at(self, index: int) -> Call | None:
        try:
            return self._calls[index]
        except IndexError:
            return None

    def _has_ended(self, call: Call, blocking: bool, no_dist: bool) -> bool:
        if no_dist:
            if blocking:
                call.wait(self._timeout)
            return call.ended.is_set()
        if call.agreement is None:
            call.agreement = Agreement(call, self._timeout, self._event)
            self._event = call.agreement.event
        if blocking:
            call.agreement.wait()
            return True
        return call.agreement.poll()
