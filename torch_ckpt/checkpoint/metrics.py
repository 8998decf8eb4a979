"""Metrics of a save."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from torch_ckpt._base.log import LOGGER


@dataclass
class SaveMetrics:
    """Durations and sizes of a save on one rank. Times are in seconds, sizes in bytes.

    Attributes:
        path: the checkpoint directory.
        rank: the rank of this process.
        blocked_s: time for which the caller was blocked, both in the call itself and while waiting
            until the save was staged.
        planning_s: time from the call until this rank received its assignment. This includes
            planning on other ranks.
        staging_s: time from the first copied byte until the tensors being saved could safely be
            modified.
        write_s, fsync_s: time spent in write and fsync system calls, summed over all threads.
        checksum_s: time spent computing checksums, summed over all threads.
        written_s: time from the call until this rank's files were written and fsynced.
        commit_s: time from the end of the ``written_s`` interval until the checkpoint was visible
            and durable. This includes waiting for other ranks.
        total_s: time from the call until the checkpoint was visible and durable.
        python_s: CPU time that the save's background thread used while holding the GIL.
        bytes: bytes written by this rank.
        state_bytes: size of the tensors in the state of this rank, except ShardedTensors. A DTensor
            counts with the size of the complete tensor.
        messages, message_bytes: number and total size of the messages that this rank sent to other
            ranks, not counting heartbeats.
        interval_s: time from the previous save's call to this save's call; 0 for the first save.

    Examples:
        ```python
        handle = torch_ckpt.async_save({"model": model}, "checkpoints/100")
        handle.result()
        metrics = handle.metrics()
        print(f"blocked for {metrics.blocked_s:.3f} s, saved in {metrics.total_s:.3f} s")
        ```
    """

    path: str = ""
    rank: int = 0
    blocked_s: float = 0.0
    planning_s: float = 0.0
    staging_s: float = 0.0
    checksum_s: float = 0.0
    write_s: float = 0.0
    fsync_s: float = 0.0
    written_s: float = 0.0
    commit_s: float = 0.0
    total_s: float = 0.0
    python_s: float = 0.0
    bytes: int = 0
    state_bytes: int = 0
    messages: int = 0
    message_bytes: int = 0
    interval_s: float = 0.0

    def log(self) -> None:
        """Logs one INFO record. The record's ``metrics`` attribute contains all values."""
        LOGGER.info(
            "saved %.3f GB to %s on rank %d in %.3f s "
            "(blocked %.3f s, staging %.3f s, commit %.3f s)",
            self.bytes / 1e9,
            self.path,
            self.rank,
            self.total_s,
            self.blocked_s,
            self.staging_s,
            self.commit_s,
            extra={"metrics": asdict(self)},
        )
