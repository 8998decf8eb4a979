"""The events of a checkpoint manager, the reports of them, and a receiver for TensorBoard."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any, Protocol

from torch_ckpt._base.log import LOGGER
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


_LEVELS = {
    "saving": logging.DEBUG,
    **dict.fromkeys(("save_failed", "damaged", "differing_replicas", "leftovers"), logging.WARNING),
}


class Reporters:
    """Reports events. Several threads may use it concurrently.

    Args:
        rank: the rank of this process. Only rank 0 writes to the log.
        on_event: called on every rank with each event. If it raises, the exception is logged.
    """

    def __init__(self, rank: int, on_event: Callable[[Event], None] | None) -> None:
        self._rank = rank
        self._on_event = on_event

    def __call__(self, event: Event) -> None:
        # All ranks log failures, because a rank's own error may not be reported anywhere else.
        if self._rank == 0 or event.kind == "save_failed":
            _log(event)
        try:
            if self._on_event is not None:
                self._on_event(event)
        except KeyboardInterrupt:
            raise
        except BaseException:
            # Do not raise: the save or load itself has not failed.
            LOGGER.exception("could not report the event %s", event.kind)


def _log(event: Event) -> None:
    extra: dict[str, Any] = {"event": event}
    if event.metrics is not None:
        extra["metrics"] = asdict(event.metrics)
    level = _LEVELS.get(event.kind, logging.INFO)
    message = event.message
    if event.kind == "restored" and _shows_restore():
        level, message = logging.WARNING, f"torch_ckpt: {message}"
    LOGGER.log(level, "%s", message, extra=extra)


_is_restore_shown = False


def _shows_restore() -> bool:
    """Returns True once per process, if no logging handler is configured.

    Without a handler, Python prints only warnings. The first restore is reported as a warning,
    because a run that has started from scratch by mistake otherwise looks normal for hours.
    """
    global _is_restore_shown
    if _is_restore_shown or LOGGER.hasHandlers():
        return False
    _is_restore_shown = True
    return True
