"""The events of a checkpoint manager."""

from __future__ import annotations

from dataclasses import dataclass

from torch_ckpt.checkpoint.metrics import SaveMetrics


@dataclass(frozen=True)
class Event:
    """An event of a :class:`torch_ckpt.CheckpointManager`.

    Attributes:
        kind: one of

            - "saving": the state has been copied, and training continues.
            - "saved": the step is complete on all ranks.
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
