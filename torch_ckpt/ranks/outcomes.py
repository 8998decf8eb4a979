"""What came of a step on a rank, as it travels to others."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from typing import Any, TypeGuard

from torch.distributed.checkpoint.api import CheckpointException

_Failure = tuple[BaseException, traceback.StackSummary]


def first_line(error: BaseException) -> str:
    """What an error says, or its type where it says nothing."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


class RankFailures:
    """Why a step failed, by rank; ``combining``: on the coordinator, of what all ranks had sent."""

    def __init__(self, by_rank: dict[int, _Failure], combining: bool) -> None:
        self.by_rank = by_rank
        self.combining = combining


def no_sign_of_life(step: str, ranks: list[int], seconds: float) -> dict[int, _Failure]:
    """The failure of ranks that have been silent for too long, by rank."""
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    error = TimeoutError(
        f"{who} sent no heartbeat for {seconds:g} s in '{step}': check that the process is still "
        "running and what it is waiting for, or allow more time"
    )
    return {rank: (error, traceback.StackSummary()) for rank in ranks}


def attempt(function: Callable[..., Any], *args: Any) -> Any:
    """What ``function`` returns; where it raises, the error and its stack, as torch wraps them."""
    try:
        return function(*args)
    except BaseException as error:
        # Without the code objects that Python 3.13 keeps in it and that do not pickle.
        stack = [(f.filename, f.lineno or 0, f.name, f.line) for f in _frames(error)]
        return _portable(error), traceback.StackSummary.from_list(stack)


def _frames(error: BaseException) -> traceback.StackSummary:
    return traceback.extract_tb(error.__traceback__)


def drop_frames(error: BaseException) -> None:
    """Lets go of an error's frames and of its causes', and so of what they refer to.

    Their text is in the stacks that go with errors here.
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
    """Whether :func:`attempt` has returned an error."""
    return (
        isinstance(outcome, tuple)
        and len(outcome) == 2
        and isinstance(outcome[0], BaseException)
        and isinstance(outcome[1], traceback.StackSummary)
    )


def failures_of(outcomes: list[Any]) -> dict[int, _Failure]:
    return {rank: outcome for rank, outcome in enumerate(outcomes) if failed(outcome)}


def _portable(error: BaseException) -> BaseException:
    """The error itself where it survives the way to the other ranks; its text otherwise."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
