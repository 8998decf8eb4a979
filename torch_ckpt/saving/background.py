"""How a save in the background behaves beside the training that goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch_ckpt import _core

#: Bytes of one staging chunk for sources on the host, and for sources on CUDA devices.
CHUNK_BYTES = _core.host_chunk_bytes
DEVICE_CHUNK_BYTES = _core.device_chunk_bytes


@dataclass(frozen=True)
class Background:
    """What the engine's threads of a background save ask of the machine.

    Attributes:
        threads: how many there are; 0 chooses for the machine. Most of them wait for the disk.
        nice: 0 to 19, or the process's own where that is more; 19 asks least of the processors.
        idle_io: I/O scheduling class "idle" instead of the process's own, where the disk has one.
        max_bytes_per_second: to the disk, of this process; 0 sets no limit.
    """

    threads: int = 0
    nice: int = 10
    idle_io: bool = True
    max_bytes_per_second: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.nice <= 19:
            raise ValueError(f"nice must be from 0 to 19, got {self.nice}")
        if self.threads < 0:
            raise ValueError(f"threads must not be negative, got {self.threads}")
        if self.max_bytes_per_second < 0:
            raise ValueError(
                f"max_bytes_per_second must not be negative, got {self.max_bytes_per_second}"
            )


@dataclass(frozen=True)
class EngineOptions:
    """What the engine is told of one save (read in csrc/torch_python/save.cpp).

    Attributes:
        writers: of the threads that write.
        snapshot: stage as far ahead of the disk as the byte budget allows.
        quiet_stagers: whether those that copy from the sources are as quiet as the writers; not
            where the caller waits for them.
        max_host_bytes: the byte budget where the writer has none of its own.
        ready: (CUDA device, event handle): sources are complete after these.
        trace: record each stretch of work.
        children: gets the results as well, for children that are forked meanwhile.
    """

    writers: Background
    snapshot: bool = True
    quiet_stagers: bool = True
    max_host_bytes: int = 0
    ready: Sequence[tuple[int, int]] = field(default=())
    trace: bool = False
    children: _core.ProcessChannel | None = None
