"""Events of a checkpoint manager, reported to a function, the log and TensorBoard."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch_ckpt._base.formatting import size
from torch_ckpt._base.log import LOGGER
from torch_ckpt.saving.metrics import SaveMetrics


@dataclass(frozen=True)
class Event:
    """An event of a :class:`torch_ckpt.CheckpointManager`.

    Attributes:
        kind: one of

            - "saving": the state has been copied, and training continues.
            - "saved": the step is complete on all ranks.
            - "save_failed": nothing was saved.
            - "restored": the state is that of the step.
            - "damaged": the step could not be loaded and was skipped.
            - "differing_replicas": ranks have different values for something that is saved once.
            - "deleted": the step was deleted by the retention rules.
            - "leftovers": files that crashes had left were deleted.
            - "preempted": all ranks stop at this step.
        step: number of the step; -1 if the event is not about a step.
        rank: the rank of this process.
        seconds: duration until training continued ("saving") or until the end; 0 if nothing took
            time.
        bytes: bytes that this rank has moved; for "saving", the size of the complete state.
        message: a text for a log.
        metrics: the metrics of a save that has ended.

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


_LEVELS = {
    "saving": logging.DEBUG,
    **dict.fromkeys(("save_failed", "damaged", "differing_replicas", "leftovers"), logging.WARNING),
}


class Reporters:
    """Reports events. Safe for several threads at once.

    Args:
        rank: the rank of this process; only rank 0 writes to the log and to TensorBoard.
        on_event: called with each event on every rank. Its exceptions are logged.
        tensorboard: a ``SummaryWriter``, another object that has ``add_scalar``, or a directory.

    Raises:
        ValueError: ``tensorboard`` is a directory, and TensorBoard is not installed.
    """

    def __init__(
        self,
        rank: int,
        on_event: Callable[[Event], None] | None,
        tensorboard: Any,
    ) -> None:
        self._rank = rank
        self._on_event = on_event
        self._writer: Any = None
        self._is_own = isinstance(tensorboard, str | os.PathLike)
        self._lock = threading.Lock()
        if rank == 0 and tensorboard is not None:
            self._writer = _summary_writer(tensorboard) if self._is_own else tensorboard

    def __call__(self, event: Event) -> None:
        # Other ranks also log a failure, which may otherwise be reported nowhere.
        if self._rank == 0 or event.kind == "save_failed":
            _log(event)
        try:
            with self._lock:
                if self._writer is not None:
                    self._add_scalars(event)
            # Without the lock: the function may call the manager and wait for the event of another
            # thread.
            if self._on_event is not None:
                self._on_event(event)
        except KeyboardInterrupt:
            raise
        except BaseException:
            # The save or load of the event has not failed.
            LOGGER.exception("could not report the event %s", event.kind)

    def close(self) -> None:
        """Closes the writer of a TensorBoard directory."""
        with self._lock:
            if self._is_own and self._writer is not None:
                self._writer.close()
                self._writer = None

    def _add_scalars(self, event: Event) -> None:
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
        for name, value in values.items():
            self._writer.add_scalar(f"checkpoint/{name}", value, event.step)


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
    """True once in a process in which no logging handler is configured.

    Python then prints only warnings. The first restore is worth one: a run that starts from scratch
    by mistake looks no different for hours.
    """
    global _is_restore_shown
    if _is_restore_shown or LOGGER.hasHandlers():
        return False
    _is_restore_shown = True
    return True


def saved_message(step: int, metrics: SaveMetrics) -> str:
    """Describes a successful save in one line."""
    return (
        f"step {step} is saved: {size(metrics.bytes)} by this rank in {metrics.total_s:.2f} s, "
        f"training waited {metrics.blocked_s * 1000:.0f} ms"
    )


def _summary_writer(directory: str | os.PathLike[str]) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            "a directory for TensorBoard needs the package tensorboard: pip install "
            "'torch_ckpt[tensorboard]', or pass an object that has add_scalar"
        ) from None
    return SummaryWriter(os.fspath(directory))
