"""The outcome of a step on each rank, in a form that can be sent to other ranks."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from typing import Any, TypeGuard

from torch.distributed.checkpoint.api import CheckpointException

_Failure = tuple[BaseException, traceback.StackSummary]


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, or the type's name if there is no text."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


class RankFailures:
    """The failures of a step, by rank. ``combining`` is True if the coordinator failed to combine
    the ranks' values."""

    def __init__(self, by_rank: dict[int, _Failure], combining: bool) -> None:
        self.by_rank = by_rank
        self.combining = combining


def heartbeat_failures(step: str, ranks: list[int], seconds: float) -> dict[int, _Failure]:
    """Returns failures, by rank, for ranks that sent no heartbeat for too long."""
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    error = TimeoutError(
        f"{who} sent no heartbeat for {seconds:g} s during '{step}': check that the process is "
        "still running and what it is waiting for, or increase the timeout"
    )
    return {rank: (error, traceback.StackSummary()) for rank in ranks}


def attempt(function: Callable[..., Any], *args: Any) -> Any:
    """Returns the result of ``function``, or its error and stack in the form that torch uses."""
    try:
        return function(*args)
    except BaseException as error:
        # Drop the code objects that Python 3.13 adds: they cannot be pickled.
        stack = [(f.filename, f.lineno or 0, f.name, f.line) for f in _frames(error)]
        return _portable(error), traceback.StackSummary.from_list(stack)


def _frames(error: BaseException) -> traceback.StackSummary:
    return traceback.extract_tb(error.__traceback__)


def drop_frames(error: BaseException) -> None:
    """Releases the frames of an error and of its causes, so that they keep no objects alive.

    The text of the frames remains in the stack that accompanies the error.
    """
    inner = [cause for cause, _ in error.failures.values()] if _is_of_ranks(error) else []
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
    for cause in inner:
        drop_frames(cause)


def _is_of_ranks(error: BaseException) -> TypeGuard[CheckpointException]:
    return isinstance(error, CheckpointException)


def failed(outcome: Any) -> bool:
    """Returns True if an outcome of :func:`attempt` is an error."""
    return (
        isinstance(outcome, tuple)
        and len(outcome) == 2
        and isinstance(outcome[0], BaseException)
        and isinstance(outcome[1], traceback.StackSummary)
    )


def failures_of(outcomes: list[Any]) -> dict[int, _Failure]:
    return {rank: outcome for rank, outcome in enumerate(outcomes) if failed(outcome)}


def _portable(error: BaseException) -> BaseException:
    """Returns the error if it can be pickled and unpickled, and otherwise a RuntimeError with its
    text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
