"""Failures of ranks: the exceptions raised for them, their texts, and whether a step's files are at
fault."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, NoReturn

from torch.distributed.checkpoint.api import WRAPPED_EXCEPTION, CheckpointException

from torch_ckpt._base.formatting import ranks_text
from torch_ckpt.errors import CheckpointError, Corrupt

# The directory of this package.
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

# Number of frames to show for errors of other code: they lead to the line in the caller's code.
_FRAMES = 3

# Number of different causes in the text; `failures` has all.
_MOST_CAUSES = 4

# Python treats these specially if they pass through a generator.
_NOT_RAISED_THROUGH = (StopIteration, StopAsyncIteration)


class CheckpointFailed(CheckpointException, CheckpointError):
    """A save or load that failed on some of its ranks. Raised on all of them.

    The exception is also of the type of the first rank's cause, and has its attributes: ``except
    FileNotFoundError`` and ``error.filename`` work as if this rank had raised the cause. Created by
    :func:`failed_on`. It can be pickled and copied.

    Attributes:
        failures: the cause and its stack by rank, as in torch's CheckpointException.
    """

    def __init__(self, step: str, failures: dict[int, WRAPPED_EXCEPTION]) -> None:
        # Not super().__init__, which may be that of the first cause's type, with other arguments.
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
            ranks.setdefault(_told(cause, stack), []).append(rank)
        lines = [f"{ranks_text(who)}: {what}" for what, who in ranks.items()]
        if len(lines) > _MOST_CAUSES:
            others = sorted(rank for who in list(ranks.values())[_MOST_CAUSES:] for rank in who)
            lines[_MOST_CAUSES:] = [
                f"{ranks_text(others)}: other causes; see the attribute `failures`"
            ]
        return "\n".join(lines) or f"'{self.args[0]}' failed"


def failed_on(step: str, failures: dict[int, WRAPPED_EXCEPTION]) -> CheckpointFailed:
    """Returns the exception that all ranks raise for the failures of some.

    Args:
        step: the step of the save or load that failed.
        failures: the failures, by rank.
    """
    cause = _first_cause(failures)
    if isinstance(cause, Exception) and not isinstance(cause, _NOT_RAISED_THROUGH):
        kind: Any = type(cause)
        # Some classes cannot be derived from, or create their objects in a special way.
        with suppress(Exception):
            return _of_kind(kind)(step, failures)
    return CheckpointFailed(step, failures)


def raise_on(rank: int, step: str, failures: dict[int, WRAPPED_EXCEPTION]) -> NoReturn:
    """Raises the failures on a rank; on a rank that was interrupted, the interruption itself.

    Raises:
        CheckpointFailed: see :func:`failed_on`.
        KeyboardInterrupt, SystemExit: this rank was interrupted.
    """
    mine = failures[rank][0] if rank in failures else None
    if mine is not None and not isinstance(mine, Exception | CheckpointException):
        raise mine
    raise failed_on(step, failures)


@contextmanager
def raised_as_ours(rank: int) -> Iterator[None]:
    """Block in which torch's code runs and its exceptions for several ranks are raised as this
    package's.

    Raises:
        CheckpointFailed, KeyboardInterrupt, SystemExit: see :func:`raise_on`.
    """
    try:
        yield
    except CheckpointException as error:
        raise_on(rank, str(error.args[0]), error.failures)


def of_torch(error: CheckpointException) -> CheckpointFailed:
    """Returns torch's exception as this package raises it."""
    if isinstance(error, CheckpointFailed):
        return error
    return failed_on(str(error.args[0]), error.failures)


def causes(error: BaseException) -> str:
    """Describes an error, with the ranks that failed."""
    if not isinstance(error, CheckpointException):
        return f"{type(error).__name__}: {error}"
    return "; ".join(
        f"rank {rank}: {type(cause).__name__}: {cause}"
        for rank, (cause, _frames) in sorted(error.failures.items())
    )


def is_damage(error: CheckpointException) -> bool:
    """Returns True if the step's files are at fault, so that another step may be intact.

    Other errors, such as a disk or a network that does not answer, must not be passed over: an
    older step would be restored, and the newer one replaced.
    """
    found = [cause for cause, _frames in error.failures.values()]
    return all(isinstance(cause, Corrupt | EOFError | FileNotFoundError) for cause in found)


def is_elsewhere(error: CheckpointException) -> bool:
    """Returns True if other ranks do not find the step that rank 0 has listed."""
    found = [cause for cause, _frames in error.failures.values()]
    return 0 not in error.failures and all(isinstance(c, FileNotFoundError) for c in found)


# --- private -------------------------------------------------------------------------------------


def _first_cause(failures: Mapping[int, WRAPPED_EXCEPTION]) -> BaseException | None:
    """Returns the cause of the lowest rank; of a cause that is itself such a failure, its first
    cause."""
    cause: BaseException | None = None
    while failures:
        cause, _stack = failures[min(failures)]
        failures = cause.failures if isinstance(cause, CheckpointException) else {}
    return cause


# Bounded, because a program may create any number of exception classes.
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
                # Some attributes are not set or cannot be set, and the object may not have the type
                # that they need.
                with suppress(AttributeError, TypeError):
                    setattr(to, name, getattr(cause, name))


def _told(cause: BaseException, stack: traceback.StackSummary | None) -> str:
    text = f"{type(cause).__name__}: {cause}"
    if not stack or stack[-1].filename.startswith(_PACKAGE):
        return text
    frames = [frame for frame in stack if not frame.filename.startswith(_PACKAGE)][-_FRAMES:]
    where = (f"\n  File {f.filename!r}, line {f.lineno}, in {f.name}" for f in frames)
    return text + "".join(where)
