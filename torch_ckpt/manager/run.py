"""What all parts of one manager know."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist

from torch_ckpt.ranks.calls import group_now
from torch_ckpt.saving.events import Event
from torch_ckpt.steps import StepStore


@dataclass
class Run:
    """The ranks that write or read beneath one root.

    Attributes:
        store: where the steps are.
        rank: this process's.
        ranks: how many there are.
        process_group: None for the default group.
        timeout: seconds after which a rank that shows no sign of life is given up.
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

    def require_group(self, what: str) -> None:
        """Where the ranks have gone, each would take itself for the only one.

        Raises:
            RuntimeError: the process group that there was at first is not there, or is new.
        """
        now, made_with = group_now(self.process_group), self._made_with
        if self.ranks > 1 and (now is None or made_with is None or now() is not made_with()):
            raise RuntimeError(
                f"the process group of the {self.ranks} ranks that made this manager has been "
                f"destroyed: it cannot {what}. Let save(), restore() and close() come before "
                "destroy_process_group(), and make another manager after init_process_group()"
            )
        if made_with is None and now is not None and dist.get_world_size(now()) > 1:
            raise RuntimeError(
                f"this manager was made before init_process_group(), where every rank takes itself "
                f"for the only one: it cannot {what}. Make it afterwards"
            )
