"""Reports the events of a checkpoint manager to a function and the log."""

from __future__ import annotations

import logging
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
