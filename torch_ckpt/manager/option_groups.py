"""Groups of the options of a checkpoint manager. Each group checks its options."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from torch_ckpt._base.checks import require_at_least, require_choice
from torch_ckpt.multihost.preemption import signal_numbers
from torch_ckpt.options import WriteOptions
from torch_ckpt.saving.replica_check import MODES

#: Number of steps between saves; time between saves; "auto"; or a function of the step, which must
#: return the same result on all ranks.
Interval = int | timedelta | Literal["auto"] | Callable[[int], bool]


@dataclass(frozen=True)
class ScheduleOptions:
    """When a manager saves; see :class:`torch_ckpt.CheckpointManager`."""

    interval: Interval
    save_on_steps: Collection[int]
    max_overhead: float
    mtbf_hours: float
    if_busy: str

    def __post_init__(self) -> None:
        require_choice("if_busy", self.if_busy, ("wait", "skip"))


@dataclass(frozen=True)
class SaveOptions:
    """How a manager saves; see :class:`torch_ckpt.CheckpointManager`."""

    check_replicas: str
    check_replicas_every: int
    on_save_error: str
    async_saves: bool
    staging: str
    on_commit: Callable[[int], None] | None
    preemption_deadline: float | None
    write: WriteOptions

    def __post_init__(self) -> None:
        require_choice("check_replicas", self.check_replicas, MODES)
        require_at_least("check_replicas_every", self.check_replicas_every, 1)
        require_choice("on_save_error", self.on_save_error, ("raise", "warn_and_continue"))
        require_choice("staging", self.staging, ("blocking", "overlapped"))


@dataclass(frozen=True)
class PreemptionOptions:
    """The preemption notices that a manager watches for.

    Attributes:
        signals: signal numbers. None watches for SIGTERM if the calling thread is the main thread.
        file: path of a file whose appearance is a notice.
    """

    signals: Iterable[int] | None
    file: str | os.PathLike[str] | None

    def __post_init__(self) -> None:
        if self.signals is not None:
            numbers = signal_numbers(self.signals, "preemption_signals")
            object.__setattr__(self, "signals", numbers)
