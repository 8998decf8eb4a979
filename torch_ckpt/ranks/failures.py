"""What failures of ranks are raised as, what they say, and which step's files they are about."""

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

# torch_ckpt itself.
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

# Of a cause that is not ours: so many frames tell where in the caller's code it comes from.
_FRAMES = 3

# So many different causes are told; `failures` has all.
_MOST_CAUSES = 4

# Python gives these a meaning where they pass through a generator.
_NOT_RAISED_THROUGH = (StopIteration, StopAsyncIteration)


class CheckpointFailed(CheckpointException, CheckpointError):
    """A save or load has failed on some of its ranks; raised on all of them.

    What is raised is also of the type of the first cause, by rank, and has that cause's attributes:
    ``except FileNotFoundError`` and ``error.filename`` work as if this rank had raised it. Made by
    :func:`failed_on`. It can be pickled and copied.

    Attributes:
        failures: by rank the cause and where it was raised, as of torch's CheckpointException.
    """

    def __init__(self, step: str, failures: dict[int, WRAPPED_EXCEPTION]) -> None:
        # Not that of the first cause's type, which has other arguments.
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
    """What to raise on all ranks for what has failed on some.

    Args:
        step: in which it failed.
        failures: by rank.
    """
    cause = _first_cause(failures)
    if isinstance(cause, Exception) and not isinstance(cause, _NOT_RAISED_THROUGH):
        kind: Any = type(cause)
        # Where a class cannot be derived from, or makes its own objects in a way of its own.
        with suppress(Exception):
            return _of_kind(kind)(step, failures)
    return CheckpointFailed(step, failures)


def raise_on(rank: int, step: str, failures: dict[int, WRAPPED_EXCEPTION]) -> NoReturn:
    """Raises it on a rank; the interruption itself where the rank was interrupted.

    Raises:
        CheckpointFailed: see :func:`failed_on`.
        KeyboardInterrupt, SystemExit: what this rank has failed by.
    """
    mine = failures[rank][0] if rank in failures else None
    if mine is not None and not isinstance(mine, Exception | CheckpointException):
        raise mine
    raise failed_on(step, failures)


@contextmanager
def raised_as_ours(rank: int) -> Iterator[None]:
    """A block in which torch's own code raises what fails on some ranks.

    Raises:
        CheckpointFailed, KeyboardInterrupt, SystemExit: see :func:`raise_on`.
    """
    try:
        yield
    except CheckpointException as error:
        raise_on(rank, str(error.args[0]), error.failures)


def of_torch(error: CheckpointException) -> CheckpointFailed:
    """The same failures as this package raises them."""
    if isinstance(error, CheckpointFailed):
        return error
    return failed_on(str(error.args[0]), error.failures)


def causes(error: BaseException) -> str:
    """What went wrong, and on which ranks."""
    if not isinstance(error, CheckpointException):
        return f"{type(error).__name__}: {error}"
    return "; ".join(
        f"rank {rank}: {type(cause).__name__}: {cause}"
        for rank, (cause, _frames) in sorted(error.failures.items())
    )


def is_damage(error: CheckpointException) -> bool:
    """Whether the step's files are at fault, and those of another step may be well.

    Other errors of the system, as of a disk or a network that does not answer, are nobody's to pass
    over: an older step would be restored, and the newer one replaced.
    """
    found = [cause for cause, _frames in error.failures.values()]
    return all(isinstance(cause, Corrupt | EOFError | FileNotFoundError) for cause in found)


def is_elsewhere(error: CheckpointException) -> bool:
    """Whether only other ranks than rank 0, which has listed it, do not find the step."""
    found = [cause for cause, _frames in error.failures.values()]
    return 0 not in error.failures and all(isinstance(c, FileNotFoundError) for c in found)


# --- private -------------------------------------------------------------------------------------


def _first_cause(failures: Mapping[int, WRAPPED_EXCEPTION]) -> BaseException | None:
    """That of the lowest rank; inside of a failure that has itself been the cause."""
    cause: BaseException | None = None
    while failures:
        cause, _stack = failures[min(failures)]
        failures = cause.failures if isinstance(cause, CheckpointException) else {}
    return cause


# Bounded: a program may make its own classes without end.
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
                # Some are not set, some cannot be, and the object may be of no such type.
                with suppress(AttributeError, TypeError):
                    setattr(to, name, getattr(cause, name))


def _told(cause: BaseException, stack: traceback.StackSummary | None) -> str:
    text = f"{type(cause).__name__}: {cause}"
    if not stack or stack[-1].filename.startswith(_PACKAGE):
        return text
    frames = [frame for frame in stack if not frame.filename.startswith(_PACKAGE)][-_FRAMES:]
    where = (f"\n  File {f.filename!r}, line {f.lineno}, in {f.name}" for f in frames)
    return text + "".join(where)
