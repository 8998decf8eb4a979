"""Where the ranks of one save or load meet. The only module that talks to a process group.

Each step runs on every rank; its outcomes, errors included, are exchanged before anybody goes on,
so that a failure anywhere raises the same ``CheckpointException`` everywhere and no rank waits for
one that has given up.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

T = TypeVar("T")
R = TypeVar("R")

_Failure = tuple[BaseException, traceback.StackSummary]


class Ranks:
    """The ranks that take part; a single one where nothing is distributed.

    Args:
        process_group: None for the default group.
        no_dist: this process alone, whatever is initialised.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, no_dist: bool) -> None:
        self.distributed = not no_dist and dist.is_available() and dist.is_initialized()
        self.group = process_group
        self.rank: int = dist.get_rank(process_group) if self.distributed else 0
        self.size: int = dist.get_world_size(process_group) if self.distributed else 1
        self.is_coordinator = self.rank == 0

    def reduce_scatter(
        self, step: str, local: Callable[[], T], combine: Callable[[list[T]], list[R]]
    ) -> R:
        """Runs ``local`` everywhere, ``combine`` on the coordinator; each rank gets its part."""
        outcome = _attempt(local)
        combined = self._combined(self._gather(outcome), combine)
        if not self.distributed:
            received = combined if isinstance(combined, _Failures) else combined[0]
        else:
            parts = [combined] * self.size if isinstance(combined, _Failures) else combined
            box: list[Any] = [None]
            dist.scatter_object_list(box, parts, src=self._coordinator(), group=self.group)
            received = box[0]
        if isinstance(received, _Failures):
            raise CheckpointException(step, received.by_rank)
        return cast(R, received)

    def all_reduce(
        self,
        step: str,
        local: Callable[[], T],
        combine: Callable[[list[T]], R],
        undo: Callable[[T], None],
    ) -> R:
        """Runs ``local`` everywhere, ``combine`` on the coordinator; each rank gets the result.

        Where ``local`` failed on a rank, ``undo`` is run on those where it did not; never after
        ``combine`` has begun.
        """
        outcome = _attempt(local)
        received = self._combined(self._gather(outcome), combine)
        if self.distributed:
            box = [received]
            dist.broadcast_object_list(box, src=self._coordinator(), group=self.group)
            received = box[0]
        if isinstance(received, _Failures):
            if not received.combining and not _failed(outcome):
                undo(outcome)
            raise CheckpointException(step, received.by_rank)
        return cast(R, received)

    def all_succeed(self, step: str, local: Callable[[], T]) -> T:
        """Runs ``local`` everywhere; raises everywhere where it failed anywhere."""
        outcome = _attempt(local)
        outcomes = [outcome]
        if self.distributed:
            verdict = outcome if _failed(outcome) else None
            outcomes = [None] * self.size
            dist.all_gather_object(outcomes, verdict, group=self.group)
        failures = _failures_of(outcomes)
        if failures:
            raise CheckpointException(step, failures)
        return cast(T, outcome)

    # --- private ---------------------------------------------------------------------------------

    def _gather(self, value: Any) -> list[Any] | None:
        """Every rank's value on the coordinator, None elsewhere."""
        if not self.distributed:
            return [value]
        gathered: list[Any] | None = [None] * self.size if self.is_coordinator else None
        dist.gather_object(value, gathered, dst=self._coordinator(), group=self.group)
        return gathered

    def _combined(self, gathered: list[Any] | None, combine: Callable[[list[Any]], Any]) -> Any:
        """On the coordinator what ``combine`` makes of the ranks' values, or who failed."""
        if gathered is None:
            return None
        failures = _failures_of(gathered)
        if failures:
            return _Failures(failures, combining=False)
        combined = _attempt(lambda: combine(gathered))
        if _failed(combined):
            return _Failures({0: combined}, combining=True)
        return combined

    def _coordinator(self) -> int:
        return dist.get_global_rank(self.group, 0) if self.group is not None else 0


class _Failures:
    def __init__(self, by_rank: dict[int, _Failure], combining: bool) -> None:
        self.by_rank = by_rank
        self.combining = combining


def _attempt(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except BaseException as error:
        # Without the code objects that Python 3.13 keeps in it and that do not pickle.
        stack = [(f.filename, f.lineno or 0, f.name, f.line) for f in _frames(error)]
        return _portable(error), traceback.StackSummary.from_list(stack)


def _frames(error: BaseException) -> traceback.StackSummary:
    return traceback.extract_tb(error.__traceback__)


def _failed(outcome: Any) -> bool:
    return (
        isinstance(outcome, tuple)
        and len(outcome) == 2
        and isinstance(outcome[0], BaseException)
        and isinstance(outcome[1], traceback.StackSummary)
    )


def _failures_of(outcomes: list[Any]) -> dict[int, _Failure]:
    return {rank: outcome for rank, outcome in enumerate(outcomes) if _failed(outcome)}


def _portable(error: BaseException) -> BaseException:
    """The error itself where it survives the way to the other ranks; its text otherwise."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
