"""Options of the engine's reads, shared by all readers of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from torch_ckpt._base.checks import require_at_least, require_io_options

#: The smallest max_inflight_bytes: with less memory, a load would be mostly overhead.
LEAST_INFLIGHT_BYTES = 1 << 20


@dataclass(frozen=True)
class ReadOptions:
    """Options of the engine's reads; see :class:`torch_ckpt.FileSystemReader`.

    Raises:
        ValueError: an option is out of range.
    """

    thread_count: int | None
    max_inflight_bytes: int
    direct_io: bool | str
    verify: bool = True

    def __post_init__(self) -> None:
        require_io_options(self.thread_count, self.direct_io)
        require_at_least("max_inflight_bytes", self.max_inflight_bytes, LEAST_INFLIGHT_BYTES)

    @property
    def threads(self) -> int:
        """Number of concurrent reads. The default may exceed the number of cores, because the
        threads wait for the disk."""
        return self.thread_count or 8
