"""What one rank is to write of a save whose writing is somebody else's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItem

from torch_ckpt.checkpoint.directory import OpenDirectory, Place
from torch_ckpt.megatron.part import Ending
from torch_ckpt.saving.background import Background
from torch_ckpt.saving.rank_write import WriteOptions
from torch_ckpt.saving.sources import Watched


@dataclasses.dataclass
class Task:
    """What one rank is to write.

    Attributes:
        directory: of the checkpoint.
        prefix: of the names of this rank's files.
        items: of the plan.
        values: of the items: what ``write_values`` takes, or torch's writing in Python.
        rank: of the writer.
        by_engine: False: in Python, by torch's own code.
        ranks: how many save together.
        options: how the files are written.
        background: how the engine's threads behave.
        open_file: opens files in Python.
        ending: who takes its results, or aborts it.
        place: the directory that was opened when the save began; None: of a remote file system.
        opened: it itself, in the process that has planned the save, until the task is staged.
    """

    directory: str
    prefix: str
    items: list[WriteItem]
    values: list[Any]
    rank: int
    ranks: int
    by_engine: bool
    options: WriteOptions
    background: Background
    open_file: Callable[..., Any] = open
    ending: Ending = dataclasses.field(default_factory=Ending)
    place: Place | None = None
    opened: OpenDirectory | None = None


#: What to do about a source that was written to while it was staged.
ADVICE = "No other thread may change it before the save is scheduled"


def watched_in(task: Task) -> Watched:
    """The tensors among a task's values."""
    watched = Watched()
    for item, value in zip(task.items, task.values, strict=True):
        if isinstance(value, torch.Tensor):
            watched.watch(item.index.fqn, value)
    return watched
