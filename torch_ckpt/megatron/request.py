"""One asynchronous save as a queue gets it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch_ckpt.errors import CheckpointError
from torch_ckpt.megatron.peers import PEERS
from torch_ckpt.megatron.write_task import Stage
from torch_ckpt.ranks.meeting import Meeting
from torch_ckpt.saving.background import Background
from torch_ckpt.saving.running_saves import spawn

STEP = "write"

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
                ranks.all_reduce(STEP, run, lambda _: None)
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
                ranks.all_reduce("finalize", lambda: self.call_idx, check_same)
            finally:
                spawn(ranks.close)
        for finalize in self.finalize_fns:
            finalize()
        return self.call_idx


def received_request(*fields: Any) -> Any:
    """A request of ours that has come to another process, of every class that is looked for there.

    A worker of theirs, in which nothing is installed, drops without a word what is not of its own
    class of requests, and whoever has sent it waits for ever.
    """
    kinds: list[Any] = [AsyncRequest]
    for peer in PEERS:
        for name in peer.modules:
            module = sys.modules.get(f"{peer.package}.{name}")
            theirs = getattr(module, AsyncRequest.__name__, AsyncRequest)
            if theirs not in kinds and getattr(theirs, "_fields", ()) == AsyncRequest._fields:
                kinds.append(theirs)
    if len(kinds) == 1:
        return AsyncRequest(*fields)
    return type(AsyncRequest.__name__, tuple(kinds), {"__slots__": ()})(*fields)


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


def check_same(indices: list[int]) -> None:
    if len(set(indices)) > 1:
        of_ranks = ", ".join(f"rank {rank} call {idx}" for rank, idx in enumerate(indices))
        raise CheckpointError(
            f"Unmatched async calls: {of_ranks}. Every rank must schedule and finalize every call"
        )
