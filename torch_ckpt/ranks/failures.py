"""Failures of ranks: how they are sent to other ranks, and the exceptions that report them."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, NamedTuple, NoReturn

from torch.distributed.checkpoint.api import WRAPPED_EXCEPTION, CheckpointException

from torch_ckpt._base.formatting import ranks_text
from torch_ckpt.errors import CheckpointError, Corrupt

# The directory of this package.
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

# Number of stack frames to show if code outside this package raised the error.
_FRAMES = 3

# Maximum number of different causes in the text. `failures` has all of them.
_MOST_CAUSES = 4

# Generators treat these exceptions specially, so no exception is derived from them.
_NOT_RAISED_THROUGH = (StopIteration, StopAsyncIteration)


class Failure(NamedTuple):
    """An error and its stack, in torch's form (``WRAPPED_EXCEPTION``), which can be sent to other
    ranks."""

    error: BaseException
    stack: traceback.StackSummary


class PeerLost(ConnectionError):
    """Another rank has closed its connection to this rank. If the other rank reports its own error,
    this error is not reported."""


class RankFailures(NamedTuple):
    """The failures of a step.

    Attributes:
        by_rank: the failure of each failed rank.
        combining: True if the coordinator had begun to combine the values of the ranks.
    """

    by_rank: dict[int, Failure]
    combining: bool = False


def capture_exceptions(function: Callable[..., Any], *args: Any) -> Any:
    """Returns the result of ``function``, or a :class:`Failure` if it raises an exception."""
    try:
        return function(*args)
    except BaseException as error:
        return failure_of(error)


def failure_of(error: BaseException) -> Failure:
    """Returns an error in the form in which it can be sent to other ranks. The stack ends in the
    code of the caller that has caused the error, if there is any."""
    frames = [*traceback.extract_tb(error.__traceback__)]
    if error.__cause__ is not None:
        frames += traceback.extract_tb(error.__cause__.__traceback__)
    # Drop the code objects that Python 3.13 adds: they cannot be pickled.
    stack = traceback.StackSummary.from_list(
        [(f.filename, f.lineno or 0, f.name, f.line) for f in frames]
    )
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return Failure(RuntimeError(f"{type(error).__name__}: {error}"), stack)
    return Failure(error, stack)


def heartbeat_failures(step: str, ranks: list[int], seconds: float) -> dict[int, Failure]:
    """Returns failures, by rank, for ranks that sent no heartbeat for too long."""
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    error = TimeoutError(
        f"{who} sent no heartbeat for {seconds:g} s during '{step}': check that the process is "
        "still running and what it is waiting for, or increase the timeout"
    )
    return dead_ranks_failures(error, ranks)


def dead_ranks_failures(error: TimeoutError, ranks: list[int]) -> dict[int, Failure]:
    """Returns failures, by rank, for ranks that were declared dead."""
    error.dead_ranks = tuple(ranks)  # type: ignore[attr-defined]
    return {rank: Failure(error, traceback.StackSummary()) for rank in ranks}


def dead_ranks(error: BaseException) -> list[int]:
    """Returns the ranks that were declared dead, according to an error. It is the same on all
    ranks, also on these ranks if they resume."""
    found: set[int] = set()
    each: BaseException | None = error
    while each is not None:
        if isinstance(each, CheckpointException):
            for cause, _stack in each.failures.values():
                found.update(getattr(cause, "dead_ranks", ()))
        each = each.__cause__
    return sorted(found)


def drop_frames(error: BaseException) -> None:
    """Releases the frames of an error and of its causes, so that they keep no objects alive.

    The text of the frames remains in the stack that accompanies the error.
    """
    causes_on_ranks = []
    if isinstance(error, CheckpointException):
        causes_on_ranks = [cause for cause, _stack in error.failures.values()]
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
    for cause in causes_on_ranks:
        drop_frames(cause)


class CheckpointFailed(CheckpointException, CheckpointError):
    """A save or load failed on at least one rank. Raised on all ranks.

    The exception is also an instance of the type of the first failed rank's error, with the same
    attributes. So ``except FileNotFoundError`` and ``error.filename`` work as if this rank had
    raised that error. :func:`failed_on` creates the exception. It can be pickled and copied.

    Attributes:
        failures: error and stack of each failed rank, as in torch's CheckpointException.
    """

    def __init__(self, step: str, failures: Mapping[int, WRAPPED_EXCEPTION]) -> None:
        # Do not use super(): it may find the __init__ of the cause's type, which has other
        # arguments.
        failures = dict(failures)
        BaseException.__init__(self, step, failures)
        cause = _first_cause(failures)
        if cause is not None:
            _copy_attributes(cause, self)
        self._failures = failures

    def __reduce__(self) -> tuple[Any, ...]:
        return failed_on, self.args, self.__dict__

    def __str__(self) -> str:
        ranks: dict[str, list[int]] = {}
        for rank, (cause, stack) in sorted(self.failures.items()):
            ranks.setdefault(_describe(cause, stack), []).append(rank)
        lines = [f"{ranks_text(who)}: {what}" for what, who in ranks.items()]
        if len(lines) > _MOST_CAUSES:
            others = sorted(rank for who in list(ranks.values())[_MOST_CAUSES:] for rank in who)
            lines[_MOST_CAUSES:] = [
                f"{ranks_text(others)}: other causes (see the attribute `failures`)"
            ]
        return "\n".join(lines) or f"'{self.args[0]}' failed"


def failed_on(step: str, failures: Mapping[int, WRAPPED_EXCEPTION]) -> CheckpointFailed:
    """Creates the exception that all ranks raise if some ranks have failed.

    Args:
        step: the step of the save or load that failed.
        failures: error and stack of each failed rank.
    """
    cause = _first_cause(failures)
    if isinstance(cause, Exception) and not isinstance(cause, _NOT_RAISED_THROUGH):
        kind: Any = type(cause)
        # Some exception types cannot be subclassed, or have an unusual __new__.
        with suppress(Exception):
            return _of_kind(kind)(step, failures)
    return CheckpointFailed(step, failures)


def raise_on(rank: int, step: str, failures: Mapping[int, WRAPPED_EXCEPTION]) -> NoReturn:
    """Raises the failures of a step on this rank. If this rank was interrupted, raises the
    interruption instead.

    Raises:
        CheckpointFailed: see :func:`failed_on`.
        KeyboardInterrupt, SystemExit: this rank was interrupted.
    """
    mine = failures[rank][0] if rank in failures else None
    if mine is not None and not isinstance(mine, Exception | CheckpointException):
        raise mine
    raise failed_on(step, failures)


@contextmanager
def reraise_torch_failures(rank: int) -> Iterator[None]:
    """Block that runs torch's code, and converts torch's CheckpointException to this package's.

    Raises:
        CheckpointFailed, KeyboardInterrupt, SystemExit: see :func:`raise_on`.
    """
    try:
        yield
    except CheckpointException as error:
        raise_on(rank, str(error.args[0]), error.failures)


def convert_torch_failure(error: CheckpointException) -> CheckpointFailed:
    """Converts torch's exception to this package's."""
    if isinstance(error, CheckpointFailed):
        return error
    return failed_on(str(error.args[0]), error.failures)


def causes(error: BaseException) -> str:
    """Describes an error. If it has the failures of several ranks, describes each of them."""
    if not isinstance(error, CheckpointException):
        return f"{type(error).__name__}: {error}"
    return "; ".join(
        f"rank {rank}: {type(cause).__name__}: {cause}"
        for rank, (cause, _frames) in sorted(error.failures.items())
    )


def is_damage(error: CheckpointException) -> bool:
    """Returns True if the load failed because the step's files are damaged or missing. Then another
    step may be intact.

    After other errors, such as a disk or network failure, the step must not be skipped: training
    would continue from an older step and replace the newer one.
    """
    found = [cause for cause, _frames in error.failures.values()]
    return all(isinstance(cause, Corrupt | EOFError | FileNotFoundError) for cause in found)


def may_be_damage(error: CheckpointException) -> bool:
    """Returns True if another copy of the files might be read without the error."""
    found = [cause for cause, _frames in error.failures.values()]
    return all(isinstance(cause, Corrupt | EOFError | OSError) for cause in found)


def is_elsewhere(error: CheckpointException) -> bool:
    """Returns True if the load failed because other ranks did not find the step rank 0 chose."""
    found = [cause for cause, _frames in error.failures.values()]
    return 0 not in error.failures and all(isinstance(c, FileNotFoundError) for c in found)


# --- private -------------------------------------------------------------------------------------


def _first_cause(failures: Mapping[int, WRAPPED_EXCEPTION]) -> BaseException | None:
    """Returns the error of the lowest failed rank. If that error itself reports failures of ranks,
    returns its first cause."""
    cause: BaseException | None = None
    while failures:
        cause, _stack = failures[min(failures)]
        failures = cause.failures if isinstance(cause, CheckpointException) else {}
    return cause


# The size is limited, because a program may create any number of exception classes.
@lru_cache(maxsize=32)
def _of_kind(kind: type[Exception]) -> type[CheckpointFailed]:
    if issubclass(CheckpointFailed, kind):
        return CheckpointFailed
    return type("CheckpointFailed", (CheckpointFailed, kind), {"__module__": __name__})


def _copy_attributes(cause: BaseException, to: BaseException) -> None:
    to.__dict__.update(cause.__dict__)
    for kind in type(cause).__mro__[: -len(Exception.__mro__)]:
        for name, what in vars(kind).items():
            if isinstance(what, MemberDescriptorType | GetSetDescriptorType):
                # Some attributes are unset, are read-only, or need an object of their own class.
                with suppress(AttributeError, TypeError):
                    setattr(to, name, getattr(cause, name))


def _describe(cause: BaseException, stack: traceback.StackSummary | None) -> str:
    text = f"{type(cause).__name__}: {cause}"
    if not stack or stack[-1].filename.startswith(_PACKAGE):
        return text
    frames = [frame for frame in stack if not frame.filename.startswith(_PACKAGE)][-_FRAMES:]
    where = (f"\n  File {f.filename!r}, line {f.lineno}, in {f.name}" for f in frames)
    return text + "".join(where)
