"""Reports the events of a checkpoint manager to a function, the log and TensorBoard."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from torch_ckpt._base.log import LOGGER
from torch_ckpt.events import Event

_LEVELS = {
    "saving": logging.DEBUG,
    **dict.fromkeys(("save_failed", "damaged", "differing_replicas", "leftovers"), logging.WARNING),
}


class Reporters:
    """Reports events. Several threads may use it concurrently.

    Args:
        rank: the rank of this process. Only rank 0 writes to the log and to TensorBoard.
        on_event: called on every rank with each event. If it raises, the exception is logged.
        tensorboard: a ``SummaryWriter``, another object with ``add_scalar``, or a directory.

    Raises:
        ValueError: ``tensorboard`` is a directory, but TensorBoard is not installed.
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
        # All ranks log failures, because a rank's own error may not be reported anywhere else.
        if self._rank == 0 or event.kind == "save_failed":
            _log(event)
        try:
            with self._lock:
                if self._writer is not None:
                    self._add_scalars(event)
            # Call the function without holding the lock: it may call the manager and wait for an
            # event that another thread reports.
            if self._on_event is not None:
                self._on_event(event)
        except KeyboardInterrupt:
            raise
        except BaseException:
            # Do not raise: the save or load itself has not failed.
            LOGGER.exception("could not report the event %s", event.kind)

    def close(self) -> None:
        """Closes the TensorBoard writer, if this object has created it."""
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
    """Returns True once per process, if no logging handler is configured.

    Without a handler, Python prints only warnings. The first restore is reported as a warning,
    because a run that has started from scratch by mistake otherwise looks normal for hours.
    """
    global _is_restore_shown
    if _is_restore_shown or LOGGER.hasHandlers():
        return False
    _is_restore_shown = True
    return True


def _summary_writer(directory: str | os.PathLike[str]) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            "writing to a TensorBoard directory requires the package tensorboard: pip install "
            "'torch_ckpt[tensorboard]', or pass an object that has add_scalar"
        ) from None
    return SummaryWriter(os.fspath(directory))
