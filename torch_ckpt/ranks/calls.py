"""Collective calls: every rank of a group calls the same function of this package.

1. Every rank sends the name of its call and a small value.
2. If the names differ, all ranks raise an error that lists them, so that no rank waits for ranks
   that make other calls.
3. The coordinator combines the values into one answer, or finds that they disagree. In that case
   all ranks raise an error that describes the disagreement.

The exchange uses the store. If a rank dies, the other ranks raise an error that names it, within
the timeout.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from torch_ckpt._base.formatting import indented, ranks_text
from torch_ckpt.ranks.meeting import Meeting

T = TypeVar("T")
R = TypeVar("R")


class RanksDisagree(AssertionError):
    """Ranks passed different names, structures or values. Raised on every rank."""


class Disagreement:
    """An answer of the coordinator that makes every rank raise :class:`RanksDisagree`.

    Args:
        text: describes the disagreement.
        lines: details; the first few are shown below the text.
        of_calls: True if ranks made different calls. Then the error does not name this rank's call.
    """

    def __init__(self, text: str, lines: Sequence[str] = (), *, of_calls: bool = False) -> None:
        self.text = f"{text}\n{indented(lines)}" if lines else text
        self.of_calls = of_calls


class Call:
    """A collective call. As a context manager, it deletes the keys in the store at the end.

    Args:
        name: name of the function, with the arguments that distinguish its calls.
        process_group: None for the default group. Without any group, this process is the only rank.
        timeout: seconds without a heartbeat after which a rank that has not arrived is declared
            dead.
        members: the ranks of the group that participate; None for all.
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
        """Runs ``local`` on every rank, and ``combine`` on one rank with the results of all ranks.
        Returns the result of ``combine`` on every rank.

        Raises:
            RanksDisagree: ranks made different calls, or ``combine`` returned a Disagreement.
            TimeoutError: ranks did not arrive. The message names them.
            ConnectionError: the store is lost.
            RuntimeError: ``local`` failed on another rank. If ``local`` failed on this rank, that
                error is raised instead.
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
        """Runs ``local`` on every rank. Raises the same errors as :meth:`exchange`."""

        def run() -> None:
            local()

        self.exchange(run, lambda _values: None)

    def alive(self, counter: Callable[[], int]) -> AbstractContextManager[None]:
        """Block in which this rank is not declared dead as long as ``counter`` changes."""
        return self._ranks.alive(counter)


def meeting_of(
    process_group: dist.ProcessGroup | None, use: str, members: Sequence[int] | None = None
) -> Meeting:
    """Returns the rendezvous of a group's ranks for one purpose.

    Raises:
        ValueError: this process is not a member of the group or of ``members``.
    """
    if dist.is_available() and dist.is_initialized():
        rank = dist.get_rank(process_group)
        if rank < 0 or (members is not None and rank not in members):
            raise ValueError(
                f"rank {dist.get_rank()} is not in the process group or mesh of this call: make "
                "the call only on its members, or pass a different process_group"
            )
    return Meeting.of(process_group, no_dist=False).apart(use, members)


def group_now(
    process_group: dist.ProcessGroup | None,
) -> weakref.ReferenceType[dist.ProcessGroup] | None:
    """Returns a weak reference to the group that a call would use now, or None if there is none."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD if process_group is None else process_group
    # A strong reference would keep the group's store alive.
    return None if group is None else weakref.ref(group)


def explained(error: CheckpointException, name: str, rank: int, timeout: float) -> BaseException:
    """Converts the error of a failed exchange into one that names the function that the user
    called."""
    causes = {by: cause for by, (cause, _stack) in error.failures.items()}
    if rank in causes and not isinstance(causes[rank], TimeoutError | ConnectionError):
        return causes[rank]
    if any(isinstance(cause, ConnectionError) for cause in causes.values()):
        return ConnectionError(
            f"{name}: {ranks_text(causes)} lost the connection to the process group's store: check "
            "that the process that hosts the store (rank 0 or torchrun's agent) is still running"
        )
    if all(isinstance(cause, TimeoutError) for cause in causes.values()):
        return TimeoutError(
            f"{name}: {ranks_text(causes)} did not arrive within {timeout:g} s and sent no "
            "heartbeat: check that the process is still running and also makes this call, or "
            "increase timeout"
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
