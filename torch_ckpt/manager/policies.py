"""Options of a checkpoint manager, grouped by decision. Each object checks its options."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Literal, TypeAlias

from torch_ckpt._base.checks import require_at_least, require_choice, require_instance
from torch_ckpt.intervals import AutoInterval
from torch_ckpt.multihost.preemption import signal_numbers
from torch_ckpt.options import ReadOptions, WriteOptions
from torch_ckpt.saving.replica_check import MODES
from torch_ckpt.steps.retention import Retention

#: Number of steps between saves; time between saves; "auto" for an :class:`AutoInterval` with its
#: defaults; or a function of the step, which must return the same result on all ranks.
Interval: TypeAlias = int | timedelta | Literal["auto"] | AutoInterval | Callable[[int], bool]


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """How each save of a manager runs, and what it compares.

    Attributes:
        save_on_steps: steps to save regardless of the interval.
        if_busy: what to do if a save is still running: "wait" blocks until the running save ends,
            and "skip" skips the new save.
        staging: "blocking" or "overlapped"; see :func:`torch_ckpt.async_save`.
        async_saves: False makes every save block until its step is complete. Exports always run in
            the background.
        check_replicas: what to do if a replicated value differs between ranks: "off" skips the
            comparison, "warn" issues a warning, and "error" fails the save. A value (a plain
            tensor, a number or another object) is replicated if several ranks have it and only one
            of these ranks saves it. See :func:`torch_ckpt.save`. Wrap values that differ between
            ranks in :class:`torch_ckpt.PerRank`.
        check_replicas_every: N compares replicas in every Nth save, starting with the first.
        on_commit: called with the step number on rank 0, in the save's thread, as soon as the step
            is complete. The save does not end on any rank until the callback has returned. If the
            callback raises an exception, the save fails on all ranks, but the step is kept. With a
            local tier, it is called when the step is complete beneath the root, in the thread that
            copies; an exception is logged.
        on_local_commit: the same for a step that is durable on the hosts' own disks; only called
            with a local tier.

    Raises:
        ValueError: an option has an invalid value.

    Example::

        saves = torch_ckpt.manager.SaveOptions(staging="overlapped", if_busy="skip")
        manager = torch_ckpt.CheckpointManager("checkpoints", interval=100, saves=saves)
    """

    save_on_steps: Collection[int] = ()
    if_busy: str = "wait"
    staging: str = "blocking"
    async_saves: bool = True
    check_replicas: str = "warn"
    check_replicas_every: int = 10
    on_commit: Callable[[int], None] | None = None
    on_local_commit: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        require_choice("if_busy", self.if_busy, ("wait", "skip"))
        require_choice("staging", self.staging, ("blocking", "overlapped"))
        require_choice("check_replicas", self.check_replicas, MODES)
        require_at_least("check_replicas_every", self.check_replicas_every, 1)
        object.__setattr__(self, "save_on_steps", frozenset(self.save_on_steps))


@dataclass(frozen=True, kw_only=True)
class Preemption:
    """The preemption notices that a manager watches for, and the time after a notice.

    Attributes:
        signals: signal numbers to treat as preemption notices. None means SIGTERM if the manager is
            created in the main thread, and otherwise no signal. If the process group is already
            being watched for preemption, for example by another manager, the existing watch is used
            instead; see :func:`torch_ckpt.multihost.watch_for_preemption`.
        file: path of a file whose creation counts as a preemption notice.
        deadline: seconds between a preemption notice and the end of the process. If given,
            ``save`` blocks until the final save, which the notice triggers, has finished. Before
            the final save starts, rank 0 logs how long the previous save took.

    Raises:
        TypeError, ValueError: a process cannot watch one of the signals.

    Example::

        preemption = torch_ckpt.manager.Preemption(signals=[signal.SIGUSR1], deadline=120)
        manager = torch_ckpt.CheckpointManager("checkpoints", preemption=preemption)
    """

    signals: Iterable[int] | None = None
    file: str | os.PathLike[str] | None = None
    deadline: float | None = None

    def __post_init__(self) -> None:
        if self.signals is not None:
            object.__setattr__(self, "signals", signal_numbers(self.signals, "signals"))


DEFAULT_SAVES = SaveOptions()
DEFAULT_PREEMPTION = Preemption()


def require_policies(preemption: object, saves: object, write: object, read: object) -> None:
    """Raises TypeError if an option of a manager is no object of its type."""
    if preemption is not None:
        require_instance("preemption", preemption, Preemption, "torch_ckpt.manager")
    require_instance("saves", saves, SaveOptions, "torch_ckpt.manager")
    require_instance("write", write, WriteOptions)
    require_instance("read", read, ReadOptions)


def _names(kind: type) -> list[str]:
    return [option.name for option in fields(kind)]


#: Former keywords of the manager, and the objects that have these options now.
MOVED: dict[str, Mapping[str, str] | Collection[str]] = {
    "keep=torch_ckpt.Retention(...)": _names(Retention),
    "interval=torch_ckpt.manager.AutoInterval(...)": _names(AutoInterval),
    "preemption=torch_ckpt.manager.Preemption(...)": {
        f"preemption_{name}": name for name in _names(Preemption)
    },
    "saves=torch_ckpt.manager.SaveOptions(...)": _names(SaveOptions),
    "write=torch_ckpt.WriteOptions(...)": _names(WriteOptions),
    "read=torch_ckpt.ReadOptions(...)": {
        **{name: name for name in _names(ReadOptions)},
        "load_options": "",
    },
    "on_event=torch_ckpt.events.TensorBoard(...)": {"tensorboard": "writer"},
}
