"""The context shared by all parts of a manager."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist

from torch_ckpt.ranks.calls import group_now
from torch_ckpt.saving.events import Event
from torch_ckpt.steps import StepStore


@dataclass
class RunContext:
    """The ranks that write or read beneath one root.

    Attributes:
        store: the steps of the root.
        rank: rank of this process.
        ranks: number of ranks.
        process_group: None for the default group.
        timeout: seconds without a heartbeat after which a rank is declared dead.
        report: called with each event.
    """

    store: StepStore
    rank: int
    ranks: int
    process_group: dist.ProcessGroup | None
    timeout: float
    report: Callable[[Event], None]
    _made_with: weakref.ReferenceType[dist.ProcessGroup] | None = field(init=False)

    def __post_init__(self) -> None:
        self._made_with = group_now(self.process_group)

    def require_group(self, action: str) -> None:
        """Checks that the process group still exists. Without it, each rank would act as if it were
        the only one.

        Args:
            action: the action to check, as a verb for the error message.

        Raises:
            RuntimeError: the process group was destroyed, or was initialized after this object was
                created.
        """
        now, made_with = group_now(self.process_group), self._made_with
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
