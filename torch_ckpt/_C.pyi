"""The part of the engine that accepts and returns tensors; see csrc/torch_python.

It makes no decisions. Import torch first, because it needs torch's libraries.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from torch_ckpt._base.in_store import InStore
from torch_ckpt._core import CheckpointIndex, Directory, ObjectRead, ProcessChannel, WrittenFiles
from torch_ckpt.options import Background, ReadOptions

class SourceWatch:
    """Tensors whose contents are read later. Detects writes to them in the meantime.

    It compares torch's version counters, which operations on the tensors increment. It does not
    see writes through ``.data`` or NumPy, nor the writes of all fused optimizers (except to
    their ``step`` tensors).
    """
    def __init__(self) -> None: ...
    def add(self, name: str, tensor: torch.Tensor, holder: Any = None, attribute: str = "") -> None:
        """Adds a tensor under a fully qualified name, which several tensors may share.

        ``holder`` is the object that has the tensor as its attribute ``attribute`` and may
        replace it by another tensor; None if the tensor cannot be replaced.
        """
    def changed(self) -> list[str]:
        """Names of the tensors that were written to, or replaced, since they were added."""
    @property
    def devices(self) -> list[torch.device]:
        """The CUDA devices of the tensors."""
    def release(self) -> None:
        """Releases the tensors and their holders."""

def fingerprint(tensor: torch.Tensor) -> int:
    """A CRC-32 of the elements of a tensor, or 0 if the tensor is not plain.

    The CRC is independent of the tensor's device and strides.
    """

class SaveSources:
    """The values to write: plain tensors, and objects with a contiguous buffer."""
    def __init__(self) -> None: ...
    def add(self, name: str, value: Any) -> None:
        """Adds a value. The name is used only for a separation hint."""
    def set_places(self, places: bytes) -> None:
        """Sets the files of which this rank writes parts, and the place of each part."""
    def add_part(
        self,
        name: str,
        tensor: torch.Tensor,
        sizes: Sequence[int],
        offsets: Sequence[int],
        cast: torch.dtype | None,
    ) -> None:
        """Adds this rank's part of a tensor of size ``sizes``, which begins at ``offsets``.

        Its place is the next one. Floating-point elements are stored with the dtype ``cast``.
        """
    @property
    def nbytes(self) -> int: ...
    def devices(self) -> list[torch.device]:
        """The CUDA devices of the tensors."""

class FlatState:
    """A state dict as rows, one for each value, with the names that torch's planners give them.

    ``local_chunks`` returns the ChunkStorageMetadata of this rank's shards of a DTensor. With
    ``watch``, plain tensors and DTensors are held by aliases and added to the watch. Raises
    ValueError if two values have the same name.
    """
    def __init__(
        self,
        state_dict: Any,
        local_chunks: Callable[[Any], list[Any]],
        watch: SourceWatch | None = None,
    ) -> None: ...
    def contents(self, hash_layout: Callable[[Any, Any], int]) -> tuple[bytes, bytes]:
        """Encodes the parts of a state dict on which the plan of a save depends.

        The first part is usually identical on several ranks: names, kinds, dtypes and sizes. The
        second part has the offsets, sizes and layouts of this rank's parts of sharded tensors.
        ``hash_layout`` returns 64 bits, given a mesh and placements.
        """
    def items_to_convert(self, assignment: bytes) -> list[tuple[int, int, Any, int]]:
        """Items that must be converted with ``set_item`` before ``sources``: objects, tensors
        that must be cloned or pickled, and the parts of described tensors.

        Returns the number of each item, its row, the value of the row, and the number of the
        item among the items of its row. The value of a DTensor is its local tensor.
        ``assignment`` has the numbers of items, as ``RankPlan.items`` returns them.
        """
    def sources(self, assignment: bytes, with_names: bool) -> SaveSources: ...
    def parts(self, assignment: bytes, places: bytes, cast: torch.dtype | None) -> SaveSources:
        """This rank's parts of tensors, for files that several ranks write.

        ``places`` has the places of the tensors; see ``SafetensorsLayout.places_of_plan``.
        Raises ValueError for a value that is not a tensor.
        """
    def fingerprints(self, whole: bool) -> bytes:
        """A fingerprint of 4 bytes for each replicated tensor; 0 for one that is not plain."""
    def checksums(self, numbers: bytes) -> bytes:
        """A CRC-32 of 4 bytes for each of the given items; 0 for tensors that are not plain."""
    def names(self) -> list[str]: ...
    def name(self, row: int) -> str: ...
    def value(self, row: int) -> Any: ...
    def path(self, row: int) -> tuple[str | int, ...]: ...
    def tensor_bytes(self) -> int:
        """Size of all plain tensors and DTensors. A DTensor counts with the size of the complete
        tensor.
        """
    def objects(self) -> list[int]:
        """Numbers of the values that are saved as objects."""
    def described_by_torch(self) -> list[int]:
        """Numbers of the tensors that only torch can describe."""
    def describe(
        self,
        row: int,
        dtype: torch.dtype,
        requires_grad: bool,
        size: Sequence[int],
        boxes: Sequence[tuple[Sequence[int], Sequence[int]]] | None,
        layout: int,
    ) -> None:
        """Sets the properties of a tensor that only torch can describe.

        ``boxes`` has the offsets and sizes of its parts on this rank; None for a replica. A row
        with several parts has several items. ``layout`` is a hash of a mesh and placements; 0
        without a mesh.
        """
    def on_meta(self) -> list[int]:
        """Rows of plain tensors and DTensors on the meta device."""
    def add(self, name: str, path: tuple[Any, ...], value: Any) -> None: ...
    def remove(self, row: int) -> None: ...
    def replace(self, row: int, value: Any) -> None: ...
    def set_part(self, row: int, part: int, value: torch.Tensor) -> None:
        """Sets the value of a part of a described tensor."""
    def set_item(self, item: int, value: Any) -> None: ...

def is_plain(value: object) -> bool:
    """True if the engine can write the value: a plain strided tensor."""

def is_dense(tensor: object) -> bool:
    """True if a tensor has no gaps, no overlap and no pending conjugation or negation."""

def copy_to_pool(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies dense CPU tensors into memory that returns to the pool with the last of the copies."""

class Save:
    """The write of one rank's files in a save (csrc/torch/tensor_save.h).

    ``watch`` detects writes to the sources of a snapshot; without it, no source changes before
    the end. One thread calls ``start``, ``run``, ``cancel_and_wait`` and ``finish``; any thread
    may call the other methods.
    """
    def __init__(self, watch: SourceWatch | None = None) -> None: ...
    def start(
        self,
        directory: Directory | InStore,
        prefix: str,
        sources: SaveSources,
        *,
        buckets: int,
        bytes_per_bucket: int = 0,
        file_per_item: bool = False,
        separation_hint: str = "",
        chunk_bytes: int = 0,
        max_host_bytes: int,
        direct_io: bool | str,
        sync: bool,
        snapshot: bool = False,
        background: Background | None = None,
        low_priority_copies: bool = True,
        ready: Sequence[tuple[int, int]] = [],
        children: ProcessChannel | None = None,
    ) -> None: ...
    def run(
        self,
        on_staged: Callable[[], object] | None = None,
        on_wait: Callable[[], object] | None = None,
        seconds: float = 1.0,
    ) -> list[str]:
        """Waits for the end. Returns the names of sources that were written to too early.

        ``on_staged`` is called once, when the sources may change. ``on_wait`` is called every
        ``seconds``. Raises the error of the save.
        """
    def cancel_and_wait(self) -> list[str]:
        """Cancels the save, and waits for its end. Returns the names of files that exist
        nevertheless.
        """
    def finish(self) -> WrittenFiles:
        """Releases all memory of a save that has ended or will not start. Returns the files."""
    def cancel(self) -> None: ...
    def make_streams_wait(self, streams: Sequence[tuple[int, int]], seconds: float) -> bool | None:
        """Makes streams of devices wait for the copies. Returns None if the copies were not
        submitted in time; then call it again.
        """
    def timing(self) -> list[float]:
        """Seconds until staged and until ended; thread seconds of staging, checksums, writes and
        fsyncs.
        """
    def progress(self) -> list[int]:
        """Bytes planned, staged and written, files planned and done."""
    def unfinished(self) -> list[tuple[str, str, int, int]]:
        """Name, phase, bytes written and total bytes of each unfinished file."""
    @property
    def file_names(self) -> list[str]: ...

class TensorRead:
    """One read of a ``TensorReads``: a region of a stored tensor, its record, and the tensor
    that receives it.
    """
    @property
    def name(self) -> str: ...
    @property
    def file(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def sizes(self) -> torch.Size: ...
    @property
    def region_offsets(self) -> torch.Size: ...
    @property
    def region_lengths(self) -> torch.Size: ...
    @property
    def tensor(self) -> torch.Tensor: ...
    @property
    def is_transformed(self) -> bool:
        """True if a transform has changed the record, so that only torch can read it."""

class TensorReads:
    """Tensors to read from the files of one checkpoint."""
    def __init__(self) -> None: ...
    def add(
        self,
        name: str,
        file: str,
        offset: int,
        length: int,
        dtype: torch.dtype,
        sizes: Sequence[int],
        region_offsets: Sequence[int],
        region_lengths: Sequence[int],
        tensor: torch.Tensor,
        is_transformed: bool = False,
    ) -> None:
        """Adds a region of a stored tensor.

        Raises Corrupt if the offset or the length is not a number of bytes, and ValueError if
        the region does not lie within the stored tensor, or ``tensor`` does not have its size.
        """
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[TensorRead]: ...
    def __getitem__(self, number: int) -> TensorRead: ...
    def split(self, max_bytes: int, can_split: Callable[[str], bool]) -> None:
        """Splits reads into targets of more than ``max_bytes`` along the first dimension.

        Splits only reads from files for whose names ``can_split`` returns True.
        """
    def subset(self, numbers: Sequence[int]) -> TensorReads: ...
    @property
    def stored_bytes(self) -> int: ...
    @property
    def digest(self) -> int:
        """A checksum of which bytes of which files are read."""
    @property
    def devices(self) -> list[torch.device]:
        """The CUDA devices of the targets."""
    def conversions(self) -> list[tuple[str, torch.dtype, torch.dtype]]:
        """Name, stored dtype and target dtype of each read that converts the elements."""
    def load(
        self,
        *,
        directory: Directory | InStore,
        tables: CheckpointIndex | dict[str, bytes],
        options: ReadOptions,
        progress: Callable[[int], None] | None = None,
        ready: Sequence[tuple[int, int]] = [],
    ) -> list[int]:
        """Fills the targets. Returns the numbers of the reads whose records only torch.load can
        read.

        ``tables`` has the checksum table of each file. ``ready`` are devices and events; targets
        on a device are written after its events.
        """

def plan_box(
    index: CheckpointIndex,
    name: str,
    offsets: Sequence[int],
    sizes: Sequence[int],
    target: torch.Tensor,
    reads: TensorReads,
) -> None:
    """Adds the reads of a box of a stored tensor into ``target``.

    Raises KeyError if there is no tensor of this name, and Corrupt if the checkpoint lacks a
    record or does not have the box completely.
    """

class SizeRule:
    """Permitted differences between the size of a tensor in the state dict and its stored size:
    none, larger dimensions in the state dict, or any sizes of as many dimensions.
    """

    SAME: ClassVar[SizeRule]
    GROWING: ClassVar[SizeRule]
    ANY: ClassVar[SizeRule]

class MatchReport:
    """How a state dict compares with a checkpoint. See torch_ckpt.LoadReport for the lists."""
    @property
    def loaded(self) -> list[str]: ...
    @property
    def missing(self) -> list[str]: ...
    @property
    def unexpected(self) -> list[str]: ...
    @property
    def shapes(self) -> list[tuple[str, torch.Size, torch.Size]]: ...
    @property
    def grown(self) -> list[tuple[str, torch.Size, torch.Size]]: ...
    @property
    def truncated(self) -> list[tuple[str, torch.Size, torch.Size]]: ...
    @property
    def dtypes(self) -> list[tuple[str, torch.dtype, torch.dtype]]: ...
    @property
    def kinds(self) -> list[int]:
        """Rows that are a tensor in the state dict and an object in the checkpoint, or vice
        versa.
        """
    @property
    def loaded_keys(self) -> list[str]:
        """Top-level keys with a value that is loaded."""
    @property
    def absent_keys(self) -> list[str]:
        """Top-level keys that contain values, none of which is loaded."""

class LoadState(FlatState):
    """The targets of a load: a flattened state dict, and what a checkpoint has for it."""
    def __init__(self, state_dict: Any, local_chunks: Callable[[Any], list[Any]]) -> None: ...
    def match(
        self, index: CheckpointIndex, rule: SizeRule, chosen: Callable[[str], bool] | None
    ) -> MatchReport:
        """Compares each value with the entry of the same name.

        ``chosen`` returns True for the names to load; None loads all.
        """
    def undescribed(self) -> list[int]:
        """Rows that are loaded as tensors and must be described before ``plan``."""
    def plan(self, reads: TensorReads) -> list[int]:
        """Adds the reads of all tensors. Returns the rows of the objects.

        Raises Corrupt if the checkpoint lacks a record or does not have a tensor completely.
        """
    def is_transformed(self, row: int) -> bool:
        """True if a transform has changed the record of an object in the plan."""
    def object_read(self, row: int) -> ObjectRead:
        """The read of an object in the plan. Its target is the value's path."""
    def loaded(self) -> list[int]: ...
    def loaded_on_meta(self) -> list[int]:
        """Rows that are loaded and are tensors on the meta device."""
    def zero_unstored(self) -> None:
        """Sets the elements to zero that lie outside the stored tensors."""

no_cuda_reason: str
has_cuda: bool
