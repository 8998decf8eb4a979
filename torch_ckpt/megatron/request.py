"""A request for one asynchronous save, as accepted by a queue."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch_ckpt.errors import CheckpointError
from torch_ckpt.megatron.write_task import tasks_in
from torch_ckpt.options import Background
from torch_ckpt.ranks.exchange import Exchange
from torch_ckpt.ranks.group import TIMEOUT_SECONDS, RankGroup

STEP = "write"

#: If the caller waits for the save, the threads keep the priorities of the process.
_NORMAL_PRIORITY = Background(nice=0, idle_io=False)


class AsyncRequest(NamedTuple):
    """A function to run in the background, with the fields of Megatron-core's ``AsyncRequest``.

    Attributes:
        async_fn: the function; None if this rank has nothing to do.
        async_fn_args: positional arguments of ``async_fn``. The result of ``preload_fn`` replaces
            the second argument.
        finalize_fns: functions to call on all ranks after ``async_fn`` has ended on all ranks.
        async_fn_kwargs: keyword arguments of ``async_fn``.
        preload_fn: function to call when the request is scheduled; can be None.
        is_frozen: True if no more finalize functions can be added.
        call_idx: number of the call in the queue.

    Examples:
        ```python
        save_fn, preload_fn, args = writer.get_save_function_and_args()
        request = torch_ckpt.megatron.AsyncRequest(save_fn, args, [], preload_fn=preload_fn)
        request.add_finalize_fn(lambda: save_state_dict_async_finalize(*finalizing))
        queue.schedule_async_request(request)
        ```
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: Sequence[Any]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: dict[str, Any] = {}  # noqa: RUF012  (default of a tuple, never modified)
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, tuple(self)

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Adds a finalize function, which is called after the existing finalize functions.

        Raises:
            RuntimeError: the request is frozen.
        """
        if self.is_frozen:
            raise RuntimeError("Cannot add finalization functions to a frozen AsyncRequest")
        self.finalize_fns.append(fn)

    def freeze(self) -> AsyncRequest:
        """Returns a frozen copy of this request."""
        return self._replace(is_frozen=True)

    def execute_sync(self) -> None:
        """Runs the request and its finalize functions in this thread. All ranks must call this
        method.

        Raises:
            CheckpointException: the request failed; raised on every rank with the cause from each
                failed rank.
        """

        def run() -> None:
            for task in tasks_in(self.async_fn_args):
                task.background = _NORMAL_PRIORITY
            arguments = stage_arguments(self)
            if self.async_fn is not None:
                self.async_fn(*arguments, **self.async_fn_kwargs)

        ranks = Exchange.open(RankGroup.of(None), "sync", TIMEOUT_SECONDS)
        try:
            # There is no timeout, so send heartbeats as long as the process runs.
            with ranks.alive(time.monotonic_ns):
                ranks.run(STEP, run)
        finally:
            ranks.close_in_background()
        self.execute_finalize_fns(validate_matching_call_idx=False)

    def execute_finalize_fns(self, validate_matching_call_idx: bool = True) -> int:
        """Calls the finalize functions.

        Args:
            validate_matching_call_idx: first check that ``call_idx`` is the same on all ranks.

        Returns:
            ``call_idx``.

        Raises:
            CheckpointException: the ranks finalize different calls; raised on every rank.
        """
        if validate_matching_call_idx:
            ranks = Exchange.open(RankGroup.of(None), "call_idx", TIMEOUT_SECONDS)
            try:
                ranks.exchange("finalize", lambda: (self.call_idx, None), require_same_call)
            finally:
                ranks.close_in_background()
        for finalize in self.finalize_fns:
            finalize()
        return self.call_idx


def _rebuild(*fields: Any) -> Any:
    """Unpickles a request. In a worker process of a replaced package, in which nothing is replaced,
    returns a request of that package.

    The worker silently drops all other requests, and the process that has sent one would wait
    forever.
    """
    work = getattr(multiprocessing.current_process(), "_target", None)
    module = sys.modules.get(getattr(work, "__module__", ""))
    theirs = getattr(module, AsyncRequest.__name__, AsyncRequest)
    has_same_fields = getattr(theirs, "_fields", ()) == AsyncRequest._fields
    return (theirs if has_same_fields else AsyncRequest)(*fields)


def stage_arguments(request: AsyncRequest) -> list[Any]:
    """Calls the preload function. Returns the arguments of ``async_fn``, with the result as the
    second.

    Raises:
        ValueError: the request has a preload function and fewer than two arguments.
    """
    arguments = list(request.async_fn_args)
    if request.preload_fn is not None and request.async_fn is not None:
        if len(arguments) < 2:
            raise ValueError(
                "a request with a preload_fn needs at least two arguments, because its result "
                f"replaces the second; got {len(arguments)}"
            )
        arguments[1] = request.preload_fn()
    return arguments


def make_background(cpu_priority: int, io_priority: int | None) -> Background:
    """Returns thread priorities for a niceness and an I/O scheduling class (None or 3: idle)."""
    return Background(nice=cpu_priority, idle_io=io_priority is None or io_priority == 3)


def require_same_call(indices: list[int]) -> None:
    if len(set(indices)) > 1:
        calls = ", ".join(f"rank {rank} call {idx}" for rank, idx in enumerate(indices))
        raise CheckpointError(
            f"Unmatched async calls: {calls}. Schedule and finalize every call on every rank"
        )
