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

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from torch_ckpt._base.formatting import indented, ranks_text
from torch_ckpt.ranks.exchange import Exchange
from torch_ckpt.ranks.group import group_for

T = TypeVar("T")
K = TypeVar("K")
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


class CollectiveCall(Exchange):
    """A collective call. As a context manager, it deletes the keys in the store at the end.

    Args:
        name: name of the function, with the arguments that distinguish its calls.
        process_group: None for the default group. Without any group, this process is the only rank.
        timeout: seconds without a heartbeat after which a rank that has not arrived is declared
            dead.
        members: the ranks of the group that participate; None for all.
    """

    first_step = ""

    def __init__(
        self,
        name: str,
        process_group: dist.ProcessGroup | None,
        timeout: float,
        members: Sequence[int] | None = None,
    ) -> None:
        group = group_for(process_group, "multihost", members)
        super().__init__(group, group.next_prefix("save"), timeout)
        self.name = name

    def agree(self, local: Callable[[], T], combine: Callable[[list[T]], R | Disagreement]) -> R:
        """Runs ``local`` on every rank, and ``combine`` on one rank with the results of all ranks.
        Returns the result of ``combine`` on every rank.

        Raises:
            RanksDisagree: ranks made different calls, or ``combine`` returned a Disagreement.
            TimeoutError: ranks did not arrive. The message names them.
            ConnectionError: the store is lost.
            RuntimeError: ``local`` failed on another rank. If ``local`` failed on this rank, that
                error is raised instead.
        """
        return self._agree(lambda: (local(), None), combine)[0]

    def run_on_all(self, local: Callable[[], K]) -> K:
        """Runs ``local`` on every rank, and returns this rank's result. Raises the same errors as
        :meth:`agree`."""
        return self._agree(lambda: (None, local()), lambda _values: None)[1]

    def _agree(
        self, send: Callable[[], tuple[T, K]], combine: Callable[[list[T]], R | Disagreement]
    ) -> tuple[R, K]:
        def send_with_name() -> tuple[tuple[str, T], K]:
            sent, kept = send()
            return (self.name, sent), kept

        def answer(received: list[tuple[str, T]]) -> Any:
            return _different_calls([name for name, _value in received]) or combine(
                [value for _name, value in received]
            )

        try:
            answered: R | Disagreement
            answered, kept = self.exchange("rendezvous", send_with_name, answer)
        except CheckpointException as error:
            raise explained(error, self.name, self.rank, self.timeout) from error
        if isinstance(answered, Disagreement):
            raise RanksDisagree(
                answered.text if answered.of_calls else f"{self.name}: {answered.text}"
            )
        return answered, kept


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
