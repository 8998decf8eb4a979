"""The part of the engine that accepts and returns tensors; see csrc/torch_python.

It makes no decisions. Import torch first, because it needs torch's libraries.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_ckpt._core import CheckpointIndex, Directory, WrittenFiles
from torch_ckpt.saving.background import EngineOptions

#: True if this build can stage from CUDA devices.
has_cuda: bool

class Save:
    """A running save. Keeps the sources alive. Dropping it cancels it and waits for its end."""

    def wait(self, seconds: float) -> bool:
        """Waits until the save ends; False after ``seconds``. Raises the save's error."""
    def wait_staged(self, seconds: float) -> bool:
        """Waits as ``wait``, until no source is needed any more."""
    def wait_submitted(self, seconds: float) -> bool:
        """Waits as ``wait``, until all copies from devices have been started."""
    def make_stream_wait(self, device: int, stream: int) -> None:
        """Makes later work on the stream wait for the copies from the device.

        Call it after ``wait_submitted`` has returned True.
        """
    def release_sources(self) -> None:
        """Releases the sources. Call it after ``wait_staged`` has returned True."""
    def elapsed(self) -> float:
        """Seconds since the start of the save."""
    def timing(self) -> tuple[float, float, float, float, float, float]:
        """Seconds until staged and until the end; seconds of all threads in staging, checksums,
        writes and fsyncs."""
    def trace(self) -> list[tuple[str, int, float, float]]:
        """Activity, file number, begin and end of each interval of work.

        Times are in seconds since the start of the save.
        """
    def progress(self) -> tuple[int, int, int, int, int]:
        """Bytes planned, staged and written; files planned and done."""
    def unfinished(self) -> list[tuple[str, str, int, int]]:
        """Name, phase, bytes written and bytes of each file that has not sent its result.

        The phases are "waiting" (for other files), "staging" (waiting for sources or memory),
        "writing" and "fsync" (waiting for the disk). Any thread may call it at any time. A forked
        child gets an empty list.
        """
    def cancel(self) -> None: ...
    def results(self) -> WrittenFiles: ...
    @property
    def file_names(self) -> list[str]: ...

def is_plain(value: object) -> bool:
    """True if the engine can write the value: a plain strided tensor."""

def is_dense(tensor: object) -> bool:
    """True if a tensor has no gaps, no overlap and no pending conjugation or negation."""

def checksums_of_samples(tensors: list[Any], most_bytes: int, stripes: int) -> list[int | None]:
    """The CRC-32 of each tensor, or of a sample of it if it has more than ``most_bytes``.

    A sample has ``most_bytes``, in ``stripes`` of equal length that are evenly spread over the
    tensor. The result is None for a tensor that is not plain, or not contiguous in host memory.
    """

def copy_to_pool(tensors: list[Any]) -> list[Any]:
    """Copies dense CPU tensors into memory that returns to the pool with the last of the copies."""

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
    chunk_bytes: int = 0,  # 0: chosen by the device of most bytes and by the budget
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
    """Fills the targets of the rows. Returns the rows whose records only torch.load can read.

    ``files`` are names relative to the directory, with their checksum tables. ``ready`` are devices
    and events; targets on a device are written after its events.
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
    """Fills the targets that a match has planned. Returns the numbers of the targets whose records
    only torch.load can read."""

class SourceWatch:
    """Tensors whose contents are read later. Detects writes to them in the meantime.

    It compares torch's version counters, which operations on the tensors increment. It does not see
    writes through ``.data`` or NumPy, nor the writes of all fused optimizers (except to their
    ``step`` tensors).
    """

    def __init__(self) -> None: ...
    def add(self, name: str, tensor: torch.Tensor, holder: Any = None, attribute: str = "") -> None:
        """Adds a tensor under a fully qualified name, which several tensors may share.

        ``holder`` is the object that has the tensor as its attribute ``attribute`` and may replace
        it by another tensor; None if the tensor cannot be replaced.
        """

    def changed(self) -> list[str]:
        """Names of the tensors that were written to, or replaced, since they were added."""

    @property
    def devices(self) -> list[torch.device]:
        """The CUDA devices of the tensors."""

    def release(self) -> None:
        """Releases the tensors and their holders."""

class FlatState:
    """A state dict as rows, one for each value, with the names that torch's planners give them.

    ``chunks_here`` returns the ChunkStorageMetadata of this rank's shards of a DTensor. With
    ``watch``, plain tensors and DTensors are held by aliases and added to the watch. Raises
    ValueError if two values have the same name.
    """

    def __init__(
        self,
        state_dict: Any,
        chunks_here: Callable[[Any], list[Any]],
        watch: SourceWatch | None = None,
    ) -> None: ...
    def __len__(self) -> int: ...
    def contents(self) -> tuple[bytes, bytes]:
        """Encodes the parts of a state dict on which the plan of a save depends.

        The first part is usually identical on several ranks: names, kinds, dtypes and sizes. The
        second part has the offsets and sizes of this rank's shards of DTensors.
        """

    def sources(self, rows: Sequence[int]) -> tuple[list[str], list[Any], list[int]]:
        """Names and values of rows, and the positions of values that the caller must convert
        first.

        The value of a DTensor is its local tensor.
        """

    def names(self) -> list[str]: ...
    def name(self, row: int) -> str: ...
    def value(self, row: int) -> Any: ...
    def path(self, row: int) -> tuple[str | int, ...]: ...
    def others(self) -> list[int]:
        """Rows that are neither plain tensors nor DTensors."""

    def plain(self) -> list[torch.Tensor]: ...
    def on_meta(self) -> list[int]:
        """Rows of plain tensors and DTensors on the meta device."""

    def is_object(self, row: int) -> bool:
        """True unless the value is a tensor, or torch's planner asks it for its parts."""

    def add(self, name: str, path: tuple[Any, ...], value: Any) -> None: ...
    def remove(self, row: int) -> None: ...
    def replace(self, row: int, value: Any) -> None: ...

class LoadMatch:
    """The rows of a state dict, compared with the entries of a checkpoint.

    ``rule`` is the rule for differing sizes: ``"same"``, ``"growing"`` or ``"any"``. ``chosen`` has
    a flag for each row that selects it; an empty list selects all rows. The status of a row is
    "loaded", "missing", "shape", "kind" or "skipped". The caller sets it for pending rows.
    """

    def __init__(
        self, state: FlatState, index: CheckpointIndex, rule: str, chosen: list[bool]
    ) -> None: ...
    def pending(self) -> list[int]: ...
    def set_status(self, row: int, status: str) -> None: ...
    def rows_with(self, status: str) -> list[int]: ...
    def names_with(self, status: str) -> list[str]: ...
    def other_sizes(self, status: str) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """Names, stored and wanted sizes of the tensors with this status."""

    def other_dtypes(self) -> list[tuple[str, torch.dtype, torch.dtype]]: ...
    def absent(self) -> list[str]:
        """Top-level keys that contain values, none of which is loaded."""

    def unexpected(self) -> list[str]: ...
    def keys(self) -> list[str]:
        """Top-level keys that contain or are a loaded value."""

    def plan(self) -> list[int]:
        """Finds the records to read. Returns the loaded rows that are left to the caller."""

    def files(self) -> list[str]:
        """Files of the index that are read. File numbers in rows are positions in this list."""

    def row(self, target: int) -> Any:
        """A target as a torch_ckpt.loading.reading.Row."""

    def rows(self) -> list[Any]: ...
    def conversions(self) -> list[tuple[str, torch.dtype, torch.dtype]]: ...
    def cuda_devices(self) -> set[int]: ...
    @property
    def bytes(self) -> int: ...
