"""The part of the engine that accepts and returns tensors; see csrc/torch_python.

It makes no decisions. It needs torch's libraries: import torch before it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_ckpt._core import CheckpointIndex, Directory, WrittenFiles
from torch_ckpt.saving.background import EngineOptions

#: Whether this build can stage from CUDA devices.
has_cuda: bool

class Save:
    """A save under way. Keeps the sources alive; dropping it unfinished cancels it and waits."""

    def wait(self, seconds: float) -> bool:
        """True once every file is done; False when the time passed before. Raises its failure."""
    def wait_staged(self, seconds: float) -> bool:
        """The same, once no source is needed any more."""
    def wait_submitted(self, seconds: float) -> bool:
        """The same, once all copies from devices have been started."""
    def make_stream_wait(self, device: int, stream: int) -> None:
        """After wait_submitted(): what is queued on the stream waits for the device's copies."""
    def release_sources(self) -> None:
        """Lets go of the values; after wait_staged()."""
    def elapsed(self) -> float:
        """Seconds since the start."""
    def timing(self) -> tuple[float, float, float, float, float, float]:
        """Seconds until staged and until the end; thread seconds of staging, checksums, writes,
        fsyncs."""
    def trace(self) -> list[tuple[str, int, float, float]]:
        """Activity, file number, begin and end in seconds since the start."""
    def progress(self) -> tuple[int, int, int, int, int]:
        """Bytes planned, staged and written; files planned and done."""
    def unfinished(self) -> list[tuple[str, str, int, int]]:
        """Name, phase, bytes written and bytes of each file that has not sent its result.

        Phases: "waiting" for other files, "staging" (for sources, or memory to copy them to),
        "writing" and "fsync" (for the disk). From any thread, at any time; none in a forked child.
        """
    def cancel(self) -> None: ...
    def results(self) -> WrittenFiles: ...
    @property
    def file_names(self) -> list[str]: ...

def is_plain(value: object) -> bool:
    """Whether the engine can write the value itself: a plain strided tensor."""

def is_dense(tensor: object) -> bool:
    """Whether a tensor has no gaps, no overlap and no pending conjugation or negation."""

def checksums_of_samples(tensors: list[Any], most_bytes: int, stripes: int) -> list[int | None]:
    """The CRC-32 of each tensor up to ``most_bytes``, of a larger one that of as many bytes: so
    many ``stripes`` of equal length, evenly spread over it. None for a tensor that is not plain, or
    not in one piece in the host's memory."""

def copy_to_pool(tensors: list[Any]) -> list[Any]:
    """Copies of dense CPU tensors, in memory that returns to the pool with the last of them."""

def start_save(
    directory: Directory,
    prefix: str,
    names: list[str],
    values: list[Any],
    *,
    buckets: int,
    bytes_per_bucket: int = 0,
    file_per_item: bool,
    separation_hint: str,
    chunk_bytes: int = 0,  # 0: chosen by where most bytes come from, and by the budget
    max_host_bytes: int,
    direct_io: bool | str,
    sync: bool,
    background: EngineOptions | None,
) -> Save: ...
def load_tensors(
    files: list[tuple[str, bytes]],
    rows: list[Any],
    *,
    directory: Directory,
    threads: int,
    max_inflight_bytes: int,
    direct_io: bool | str,
    verify: bool,
    progress: Callable[[int], None] | None,
    ready: list[tuple[int, int]],
) -> list[int]:
    """Fills the rows' targets; returns the rows whose records only torch.load knows.

    ``files`` are names beneath the directory and their checksum tables; ``ready`` are devices and
    events, after which targets there may be written.
    """

def told_of(state: FlatState) -> tuple[bytes, bytes]:
    """What a plan of a save depends on in a state dict: what ranks have alike (names, kinds, dtypes
    and sizes), and which parts of the DTensors are here.
    """

def sources_of(state: FlatState, rows: Sequence[int]) -> tuple[list[str], list[Any], list[int]]:
    """Names and values of rows, and the places of those that the engine does not write as they are.

    Of DTensors the local tensor.
    """

def load_matched(
    match: LoadMatch,
    *,
    directory: Directory,
    threads: int,
    max_inflight_bytes: int,
    direct_io: bool | str,
    verify: bool,
    progress: Callable[[int], None] | None,
    ready: list[tuple[int, int]],
) -> list[int]:
    """The same of what a match has planned; returns numbers of its targets."""

class FlatState:
    """A state dict as rows, one for each value, with the names that torch's planners give them.

    ``chunks_here`` gives the ChunkStorageMetadata that this rank has of a DTensor. Raises
    ValueError where two values have the same name.
    """

    def __init__(self, state_dict: Any, chunks_here: Callable[[Any], list[Any]]) -> None: ...
    def __len__(self) -> int: ...
    def names(self) -> list[str]: ...
    def name(self, row: int) -> str: ...
    def value(self, row: int) -> Any: ...
    def path(self, row: int) -> tuple[str | int, ...]: ...
    def others(self) -> list[int]:
        """The rows that are neither plain tensors nor DTensors."""

    def plain(self) -> list[torch.Tensor]: ...
    def on_meta(self) -> list[int]:
        """The rows of plain tensors and DTensors without memory."""

    def is_object(self, row: int) -> bool:
        """Whether it is neither a tensor nor what torch's planner asks for its parts."""

    def add(self, name: str, path: tuple[Any, ...], value: Any) -> None: ...
    def remove(self, row: int) -> None: ...
    def replace(self, row: int, value: Any) -> None: ...

class LoadMatch:
    """A state dict beside a checkpoint.

    ``rule`` is "same", "growing" or "any": which sizes a stored tensor goes with. ``chosen`` says
    of each row whether to look at it; empty: all. The status of a row is "loaded", "missing",
    "shape", "kind" or "skipped", or pending until the caller sets it.
    """

    def __init__(
        self, state: FlatState, index: CheckpointIndex, rule: str, chosen: list[bool]
    ) -> None: ...
    def pending(self) -> list[int]: ...
    def set_status(self, row: int, status: str) -> None: ...
    def rows_with(self, status: str) -> list[int]: ...
    def names_with(self, status: str) -> list[str]: ...
    def other_sizes(self, status: str) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """Names, stored and wanted sizes of tensors that differ in them."""

    def other_dtypes(self) -> list[tuple[str, torch.dtype, torch.dtype]]: ...
    def absent(self) -> list[str]:
        """Keys at the top with values of which none is loaded."""

    def unexpected(self) -> list[str]: ...
    def keys(self) -> list[str]:
        """Keys at the top of which something is loaded."""

    def plan(self) -> list[int]:
        """Finds the records to read, and returns the loaded rows that are left to the caller."""

    def files(self) -> list[str]:
        """Those of the index, which the rows' numbers count."""

    def row(self, target: int) -> Any:
        """A torch_ckpt.loading.reading.Row."""

    def rows(self) -> list[Any]: ...
    def conversions(self) -> list[tuple[str, torch.dtype, torch.dtype]]: ...
    def cuda_devices(self) -> set[int]: ...
    @property
    def bytes(self) -> int: ...

def versions_of(tensors: list[torch.Tensor]) -> list[int]:
    """Numbers that change whenever torch writes to the tensors; -1 of inference tensors, which have
    none."""
