"""The events of a checkpoint manager, and a receiver that records them in TensorBoard."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

from torch_ckpt.checkpoint.metrics import SaveMetrics


@dataclass(frozen=True)
class Event:
    """An event of a :class:`torch_ckpt.CheckpointManager`.

    Attributes:
        kind: one of

            - "saving": the state has been copied, and training continues.
            - "saved": the step is complete on all ranks.
            - "published": with a local tier, the step is complete beneath the root.
            - "save_failed": the save failed; nothing was saved.
            - "exported": the model of the step is published.
            - "export_failed": the export failed; nothing was published.
            - "restored": the state was restored from the step.
            - "damaged": the step could not be loaded and was skipped.
            - "differing_replicas": a value that only one rank saves differs between ranks.
            - "deleted": the retention rules deleted the step.
            - "leftovers": files left behind by a crash were deleted.
            - "preempted": all ranks stop at this step.
        step: the step number; -1 if the event does not concern a step.
        rank: the rank of this process.
        seconds: duration of the operation; for "saving", the time until training continued; 0 if
            the event has no duration.
        bytes: bytes that this rank has moved; for "saving", the size of the complete state.
        message: a text for the log.
        metrics: the metrics of the save, if it has ended.

    Examples:
        ```python
        def report(event: Event) -> None:
            if event.kind == "save_failed":
                alert(f"step {event.step}: {event.message}")

        manager = torch_ckpt.CheckpointManager("checkpoints", on_event=report)
        ```
    """

    kind: str
    step: int
    rank: int
    seconds: float = 0.0
    bytes: int = 0
    message: str = ""
    metrics: SaveMetrics | None = None


class _Scalars(Protocol):
    """A ``SummaryWriter``, or another object that records numbers."""

    def add_scalar(self, tag: str, value: float, step: int, /) -> object:
        """Records a number."""


class TensorBoard:
    """Records the durations and sizes of rank 0's saves and restores in TensorBoard. Pass it to a
    manager as ``on_event``.

    Args:
        writer: a ``SummaryWriter``, another object with ``add_scalar``, or the directory in which
            rank 0 creates a ``SummaryWriter`` at its first event.

    Raises:
        ValueError: ``writer`` is a directory, but TensorBoard is not installed.

    Example::

        board = torch_ckpt.events.TensorBoard("runs/1")
        manager = torch_ckpt.CheckpointManager("checkpoints", on_event=board)
    """

    def __init__(self, writer: _Scalars | str | os.PathLike[str]) -> None:
        if isinstance(writer, str | os.PathLike) and find_spec("tensorboard") is None:
            raise ValueError(
                "writing to a TensorBoard directory requires the package tensorboard: pip install "
                "'torch_ckpt[tensorboard]', or pass an object that has add_scalar"
            )
        self._writer: Any = writer
        self._is_own = False
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Records an event. Several threads may call this method concurrently."""
        values: dict[str, float] = {}
        if event.kind == "saved" and event.metrics is not None:
            metrics = event.metrics
            values = {
                "blocked_seconds": metrics.blocked_s,
                "background_seconds": metrics.total_s - metrics.blocked_s,
                "training_seconds_between_saves": metrics.interval_s,
                "bytes": float(event.bytes),
            }
        elif event.kind in ("restored", "save_failed"):
            values = {f"{event.kind}_seconds": event.seconds}
        if event.rank != 0 or not values:
            return
        with self._lock:
            if isinstance(self._writer, str | os.PathLike):
                from torch.utils.tensorboard import SummaryWriter

                self._writer, self._is_own = SummaryWriter(os.fspath(self._writer)), True
            for name, value in values.items():
                self._writer.add_scalar(f"checkpoint/{name}", value, event.step)
            if self._is_own:
                self._writer.flush()
