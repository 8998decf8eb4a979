"""The context shared by all parts of a manager, and the agreements between its ranks.

When a manager is created, the ranks check that they have the same root and agree on an attempt: 8
hex digits, unique to this run, in the names of unfinished steps (csrc/directory/step.h).
"""

from __future__ import annotations

import time
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch.distributed as dist

from torch_ckpt.events import Event
from torch_ckpt.ranks.collective_call import CollectiveCall, Disagreement
from torch_ckpt.ranks.group import current_group
from torch_ckpt.steps import StepStore
from torch_ckpt.steps.root_lease import TIMES, RootLease

T = TypeVar("T")


@dataclass
class RunContext:
    """The ranks that write or read beneath one root.

    Attributes:
        store: the steps of the root.
        lease: this rank's lease on the root.
        attempt: the 8 hex digits that the ranks have agreed on.
        rank: rank of this process.
        ranks: number of ranks.
        process_group: None for the default group.
        timeout: seconds without a heartbeat after which a rank is declared dead.
        report: called with each event.
        read_only: True if the manager never saves or deletes.
    """

    store: StepStore
    lease: RootLease
    attempt: str
    rank: int
    ranks: int
    process_group: dist.ProcessGroup | None
    timeout: float
    report: Callable[[Event], None]
    read_only: bool
    _made_with: weakref.ReferenceType[dist.ProcessGroup] | None = field(init=False)

    def __post_init__(self) -> None:
        self._made_with = current_group(self.process_group)

    def require_group(self, action: str) -> None:
        """Checks that the process group still exists. Without it, each rank would act as if it were
        the only one.

        Args:
            action: the action to check, as a verb for the error message.

        Raises:
            RuntimeError: the process group was destroyed, or was initialized after this object was
                created.
        """
        now, made_with = current_group(self.process_group), self._made_with
        if self.ranks > 1 and (now is None or made_with is None or now() is not made_with()):
            raise RuntimeError(
                f"cannot {action}: the process group of the manager's {self.ranks} ranks has been "
                "destroyed. Call save(), restore() and close() before destroy_process_group(), and "
                "create a new manager after the next init_process_group()."
            )
        if made_with is None and now is not None and dist.get_world_size(now()) > 1:
            raise RuntimeError(
                f"cannot {action}: the manager was created before init_process_group(), so each "
                "rank would act as if it were the only one. Create the manager afterwards."
            )

    def ask_rank_0(self, call: str, function: Callable[[], T]) -> T:
        """Calls a function on rank 0 and returns its result on all ranks.

        Args:
            call: name of the function that the user called, for error messages.

        Raises:
            TimeoutError, ConnectionError, RuntimeError: see :meth:`CollectiveCall.agree`.
        """

        def result_of_rank_0(results: list[T | None]) -> T | Disagreement:
            return results[0]  # type: ignore[return-value]

        with CollectiveCall(call, self.process_group, self.timeout) as exchange:
            return exchange.agree(
                lambda: function() if exchange.rank == 0 else None, result_of_rank_0
            )


def agree_on_attempt(
    root: str,
    before: Callable[[], None],
    *,
    process_group: dist.ProcessGroup | None,
    timeout: float,
) -> str:
    """Chooses one attempt for all ranks.

    Args:
        before: called first, on each rank. If it raises an exception on one rank, all ranks raise.

    Raises:
        RanksDisagree: ranks have different roots.
        TimeoutError, ConnectionError, RuntimeError: see :meth:`CollectiveCall.agree`.
    """

    def propose() -> tuple[str, str]:
        # before() may have to wait until another run's lease expires.
        started = time.monotonic()
        with call.alive(lambda: int(min(time.monotonic() - started, 2 * TIMES.expiry))):
            before()
        return root, new_attempt()

    def choose(proposals: list[tuple[str, str]]) -> str | Disagreement:
        if len({root for root, _attempt in proposals}) > 1:
            return Disagreement(
                "ranks have different roots:",
                [f"rank {rank}: {root}" for rank, (root, _) in enumerate(proposals)],
            )
        return proposals[0][1]

    with CollectiveCall("CheckpointManager", process_group, timeout) as call:
        return call.agree(propose, choose)


def new_attempt() -> str:
    """Returns 8 random hex digits, which identify this run."""
    return uuid.uuid4().hex[:8]
