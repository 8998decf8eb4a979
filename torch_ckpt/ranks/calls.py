"""One call of one of the functions here, on every rank of a group.

1. Every rank comes to the meeting with the name of its call and a small value.
2. Where the names differ all raise, with who came to which: no rank waits for one that does
   something else.
3. The coordinator makes one answer of the values, or says in what they differ, and all raise that.

Meetings are in the store, so that a rank that is dead is named on the others within the timeout.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from torch_ckpt._base.formatting import ranks_text
from torch_ckpt._base.trees import indented
from torch_ckpt.ranks.meeting import Meeting

T = TypeVar("T")
R = TypeVar("R")


class RanksDisagree(AssertionError):
    """Ranks came with different names, structures or values; raised on every rank alike."""


class Disagreement:
    """What the coordinator answers for :class:`RanksDisagree` to be raised.

    Args:
        lines: of which the first few are shown below the text.
        of_calls: ranks made different calls, of which none can be named as the one that failed.
    """

    def __init__(self, text: str, lines: Sequence[str] = (), *, of_calls: bool = False) -> None:
        self.text = f"{text}\n{indented(lines)}" if lines else text
        self.of_calls = of_calls


class Call:
    """Where the ranks of a call meet; a context manager, which ends the use of the store.

    Args:
        name: of the function, with what tells one of its calls from another one.
        process_group: None for the default group; without one this process is alone.
        timeout: seconds after which a rank that has not come, and gives no sign of life, is
            given up.
        members: of the ranks of the group those that take part; None for all.
    """

    def __init__(
        self,
        name: str,
        process_group: dist.ProcessGroup | None,
        timeout: float,
        members: Sequence[int] | None = None,
    ) -> None:
        self._ranks = meeting_of(process_group, "multihost", members).ranks(timeout)
        self.name = name
        self._timeout = timeout
        self.rank = self._ranks.rank
        self.size = self._ranks.size
        self.distributed = self._ranks.distributed

    def __enter__(self) -> Call:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._ranks.close(min(60.0, self._timeout))

    def exchange(self, local: Callable[[], T], combine: Callable[[list[T]], R | Disagreement]) -> R:
        """What ``combine`` makes on one rank of what ``local`` returns on each, everywhere.

        Raises:
            RanksDisagree: other ranks made another call, or ``combine`` says so.
            TimeoutError: ranks that did not come are named.
            ConnectionError: the store is lost.
            RuntimeError: ``local`` failed on another rank; what it raised here is raised here.
        """

        def answer(came: list[tuple[str, T]]) -> R | Disagreement:
            return _different_calls([name for name, _value in came]) or combine(
                [value for _name, value in came]
            )

        try:
            answered = self._ranks.all_reduce("meeting", lambda: (self.name, local()), answer)
        except CheckpointException as error:
            raise explained(error, self.name, self.rank, self._timeout) from error
        if isinstance(answered, Disagreement):
            raise RanksDisagree(
                answered.text if answered.of_calls else f"{self.name}: {answered.text}"
            )
        return answered

    def all_succeed(self, local: Callable[[], Any]) -> None:
        """Runs ``local`` everywhere; raises everywhere what ``exchange`` does."""

        def run() -> None:
            local()

        self.exchange(run, lambda _values: None)

    def alive(self, counter: Callable[[], int]) -> AbstractContextManager[None]:
        """While it is open the others wait for this rank for as long as ``counter`` changes."""
        return self._ranks.alive(counter)


def meeting_of(
    process_group: dist.ProcessGroup | None, use: str, members: Sequence[int] | None = None
) -> Meeting:
    """Where the ranks of a group meet for one use.

    Raises:
        ValueError: this process is not one of them.
    """
    if dist.is_available() and dist.is_initialized():
        rank = dist.get_rank(process_group)
        if rank < 0 or (members is not None and rank not in members):
            raise ValueError(
                f"rank {dist.get_rank()} is not in the process group or the mesh of this call: "
                "make the call on its members only, or pass another process_group"
            )
    return Meeting.of(process_group, no_dist=False).apart(use, members)


def group_now(
    process_group: dist.ProcessGroup | None,
) -> weakref.ReferenceType[dist.ProcessGroup] | None:
    """The group that a call would have now; None where no process group is initialized."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD if process_group is None else process_group
    # Not held: its store goes with it.
    return None if group is None else weakref.ref(group)


def explained(error: CheckpointException, name: str, rank: int, timeout: float) -> BaseException:
    """The failure of a meeting, as the caller of the function that is named knows it."""
    causes = {by: cause for by, (cause, _stack) in error.failures.items()}
    if rank in causes and not isinstance(causes[rank], TimeoutError | ConnectionError):
        return causes[rank]
    if any(isinstance(cause, ConnectionError) for cause in causes.values()):
        return ConnectionError(
            f"{name}: {ranks_text(causes)} lost the process group's store: check that the "
            "process that hosts it, rank 0 or torchrun's agent, is still running"
        )
    if all(isinstance(cause, TimeoutError) for cause in causes.values()):
        return TimeoutError(
            f"{name}: {ranks_text(causes)} did not arrive within {timeout:g} s and sent no "
            "heartbeat: check that the process is still running and makes this call too, or allow "
            "more time (timeout=)"
        )
    by, cause = next(iter(causes.items()))
    return RuntimeError(f"{name} failed on rank {by}: {type(cause).__name__}: {cause}")


def _different_calls(names: list[str]) -> Disagreement | None:
    if len(set(names)) == 1:
        return None
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        ranks.setdefault(name, []).append(rank)
    return Disagreement(
        "ranks made different calls; all ranks must make the same calls, in the same order:",
        [f"{ranks_text(who)}: {name}" for name, who in ranks.items()],
        of_calls=True,
    )
