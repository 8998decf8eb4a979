"""Options of background saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch_ckpt import _core

#: Size in bytes of a staging chunk for sources on the host, and for sources on CUDA devices.
CHUNK_BYTES = _core.host_chunk_bytes
DEVICE_CHUNK_BYTES = _core.device_chunk_bytes


@dataclass(frozen=True)
class Background:
    """Threads and priorities of background saves. The lower the priority, the less a save slows
    down training.

    Attributes:
        threads: number of engine threads; 0 starts as many as the files need. Most of these threads
            wait for the disk.
        nice: niceness of the threads, from 0 to 19 (the lowest priority). If the process has a
            higher niceness, the threads use the niceness of the process instead.
        idle_io: use the I/O scheduling class "idle", if the disk's I/O scheduler supports
            scheduling classes. False keeps the I/O scheduling class of the process.
        max_bytes_per_second: maximum rate at which this process writes to the disk; 0 sets no
            limit.

    Raises:
        ValueError: an attribute is out of range.

    Examples:
        ```python
        gentle = torch_ckpt.Background(nice=19, max_bytes_per_second=500_000_000)
        torch_ckpt.async_save({"model": model}, "checkpoints/100", background=gentle)
        ```
    """

    threads: int = 0
    nice: int = 10
    idle_io: bool = True
    max_bytes_per_second: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.nice <= 19:
            raise ValueError(f"nice must be between 0 and 19, got {self.nice}")
        if self.threads < 0:
            raise ValueError(f"threads must not be negative, got {self.threads}")
        if self.max_bytes_per_second < 0:
            raise ValueError(
                f"max_bytes_per_second must not be negative, got {self.max_bytes_per_second}"
            )


@dataclass(frozen=True)
class EngineOptions:
    """The engine's options for a background save, which csrc/torch_python/save.cpp reads.

    Attributes:
        writers: priorities of the threads that write.
        snapshot: stage as far ahead of the disk as the memory budget allows.
        quiet_stagers: run the threads that copy from the sources at the low priority of the
            writers, too. False if the caller waits for these threads.
        ready: (CUDA device, event handle) pairs. The sources are complete after these events.
        trace: record the time spans of the work.
        children: channel that also passes the results to children forked during the save.
    """

    writers: Background
    snapshot: bool = True
    quiet_stagers: bool = True
    ready: Sequence[tuple[int, int]] = field(default=())
    trace: bool = False
    children: _core.ProcessChannel | None = None
