"""A checkpoint on disk: the result of a save, and of ``torch_ckpt.open``."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_ckpt.errors import CheckpointError, Corrupt
from torch_ckpt.options import DEFAULT_READ_OPTIONS, ReadOptions

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.metadata import Metadata
    from typing_extensions import Self  # in typing since Python 3.11

    from torch_ckpt import _core
    from torch_ckpt.checkpoint.metrics import SaveMetrics
    from torch_ckpt.checkpoint.source import Source

#: Offsets and sizes of a region of a tensor, one per dimension.
Box = tuple[tuple[int, ...], tuple[int, ...]]


class StoredTensor(NamedTuple):
    """The dtype and shape of a tensor, from the metadata."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Record(NamedTuple):
    """The location of a shard or an object in a file; for a shard, also its region of the tensor.

    Offset and length are in bytes, offsets and sizes in elements.
    """

    file: str
    offset: int
    length: int
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


class Checkpoint:
    """A checkpoint on disk, with any sharding.

    A save returns one that is closed: each call opens the checkpoint and closes it again.
    :func:`torch_ckpt.open` and ``with`` keep the directory open, with a shared lock, so that no
    concurrent save removes a file.

    Args:
        path: path or URL of the checkpoint.
        metrics: see below.
        seal: the end of the metadata that the save has written.
        options: the options of the reads.

    Attributes:
        path: path or URL of the checkpoint.
        metrics: durations and sizes of the save that returned the checkpoint, on this rank; None if
            no save returned it.

    Raises (from all methods):
        FileNotFoundError: there is no committed checkpoint.
        CheckpointError: another save has replaced the checkpoint since the save that returned it.
        Corrupt, Unsafe, OSError: the checkpoint is damaged, would run code, or cannot be read.

    Example::

        with torch_ckpt.open("checkpoints/100") as checkpoint:
            print(checkpoint.names)
            rows = checkpoint.read("model.embedding.weight", ((0, 0), (10, 512)))
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        metrics: SaveMetrics | None = None,
        seal: bytes = b"",
        options: ReadOptions = DEFAULT_READ_OPTIONS,
    ) -> None:
        self.path = os.fspath(path)
        self.metrics = metrics
        self._seal = seal
        self._options = options
        self._source: Source | None = None

    def __repr__(self) -> str:
        return f"Checkpoint({self.path!r})"

    # --- open and closed -------------------------------------------------------------------------

    def open(self) -> Self:
        """Opens the checkpoint until :meth:`close`. Returns this object."""
        if self._source is None:
            self._source = self._open()
        return self

    def close(self) -> None:
        """Closes the checkpoint. Further calls do nothing."""
        source, self._source = self._source, None
        self.__dict__.pop("_gaps", None)
        if source is not None:
            source.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def source(self) -> Iterator[Source]:
        """Block with the open source of this checkpoint."""
        if self._source is not None:
            yield self._source
            return
        source = self._open()
        try:
            yield source
        finally:
            source.close()

    # --- the contents ----------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Fully qualified names of all values, in the checkpoint's order."""
        with self.source() as source:
            return _index_of(source).names()

    def __contains__(self, name: str) -> bool:
        with self.source() as source:
            return name in _index_of(source)

    @property
    def files(self) -> list[str]:
        """Names of the data files, relative to the checkpoint directory."""
        with self.source() as source:
            return _index_of(source).files()

    @property
    def location(self) -> str:
        """Path of the checkpoint directory or of the safetensors file. If ``path`` is a run's root,
        this is the step's directory."""
        with self.source() as source:
            return source.location

    @property
    def safetensors_metadata(self) -> dict[str, str] | None:
        """The metadata of safetensors files; None if the checkpoint has another format."""
        with self.source() as source:
            return None if source.safetensors is None else source.safetensors.metadata

    def metadata(self) -> Metadata:
        """Returns torch's metadata: names, shapes, dtypes and locations of all values."""
        with self.source() as source:
            return source.metadata()

    def paths(self) -> dict[str, Any]:
        """Returns the path of each name in the nested state dict; empty if not recorded."""
        paths = self.metadata().planner_data
        return paths if isinstance(paths, dict) else {}

    def tensor(self, name: str) -> StoredTensor | None:
        """Returns the dtype and shape of a tensor; None if the name is an object.

        Raises:
            Corrupt: the shards do not cover the tensor.
        """
        import torch

        with self.source() as source:
            found = _index_of(source).tensor(name)
        if found is None:
            return None
        gap = self._gaps.get(name)
        if gap is not None:
            raise Corrupt(f"{self.path}: {name}: {gap}. Run torch-ckpt verify on the checkpoint")
        return StoredTensor(getattr(torch, found[0]), found[1])

    def tensor_bytes(self, name: str) -> int:
        """Returns the size of the complete tensor in bytes; 0 for an object."""
        import torch

        with self.source() as source:
            found = _index_of(source).tensor(name)
        return 0 if found is None else math.prod(found[1]) * getattr(torch, found[0]).itemsize

    def records(self, name: str) -> list[Record]:
        """Returns the locations of a tensor's shards, or of an object.

        Raises:
            Corrupt: the metadata does not locate every record.
            CheckpointError: a record was stored through a stream transform.
        """
        records = []
        with self.source() as source:
            shards = _index_of(source).shards(name)
        for offsets, sizes, file, offset, length, is_transformed in shards:
            if file is None:
                raise Corrupt(
                    f"{self.path}: {name}: the metadata gives no location for it. "
                    "Run torch-ckpt verify on the checkpoint"
                )
            if is_transformed:
                raise CheckpointError(
                    f"{self.path}: {name} was stored through a stream transform, which only a load "
                    "can undo"
                )
            records.append(Record(file, offset, length, offsets, sizes))
        return records

    # --- the values ------------------------------------------------------------------------------

    def read(self, name: str, box: Box | None = None) -> Any:
        """Reads a value.

        Args:
            box: offsets and sizes of the region of a tensor to read; None reads all of it.

        Returns:
            A new tensor on the CPU, or the object.

        Raises:
            KeyError: there is no value of this name.
            ValueError: the box is not inside of the tensor, or the value is an object.
        """
        if name not in self:
            raise KeyError(name)
        tensor = self.tensor(name)
        if tensor is None:
            if box is not None:
                raise ValueError(f"{name} is an object, so it cannot be read in boxes")
            return self.read_object(name)
        if box is not None:
            _require_inside(name, tensor.shape, box)
        [value] = self.read_boxes([(name, box or ((0,) * len(tensor.shape), tensor.shape))])
        return value

    def read_boxes(
        self,
        boxes: Sequence[tuple[str, Box]],
        allocate: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """Reads boxes of tensors, given as names and boxes, into tensors from ``allocate``."""
        import torch

        from torch_ckpt import _C
        from torch_ckpt.checkpoint.tensor_bytes import empty_tensor

        reads, targets = _C.TensorReads(), []
        with self.source() as source:
            index = _index_of(source)
            for name, (offsets, sizes) in boxes:
                found = index.tensor(name)
                assert found is not None
                target = (allocate or empty_tensor)(sizes, getattr(torch, found[0]))
                targets.append(target)
                _C.plan_box(index, name, offsets, sizes, target, reads)
            if len(reads):
                source.read_tensors(reads)
        return targets

    def read_object(self, name: str) -> Any:
        """Reads an object; only allow-listed types unless ``allow_pickle`` is True."""
        from torch_ckpt import _core
        from torch_ckpt.checkpoint.reading import Reading

        (record,) = self.records(name)
        # An object cannot be read in parts, so raise the limit by the memory that it needs.
        limit = self._options.max_inflight_bytes + 2 * record.length
        options = replace(self._options, max_inflight_bytes=limit)
        read = _core.ObjectRead(name, record.file, record.offset, record.length, (name,))
        reading = Reading()
        with self.source() as source:
            (data,) = source.read_bytes([read], options)
        reading.store(read, data, options.allow_pickle)
        return reading.values[name]

    def read_chunks(self, name: str, record: Record, max_bytes: int) -> Iterator[bytes]:
        """Yields the stored bytes of a record, at most ``max_bytes // 2`` at a time."""
        from torch_ckpt import _core

        chunk = max_bytes // 2
        # An object's checksum covers all of its bytes, so it cannot verify one chunk.
        verify = self._options.verify and record.length <= chunk
        options = replace(self._options, verify=verify)
        with self.source() as source:
            for begin in range(0, record.length, chunk):
                count = min(chunk, record.length - begin)
                read = _core.ObjectRead(name, record.file, record.offset + begin, count)
                yield source.read_bytes([read], options)[0]

    # --- private ---------------------------------------------------------------------------------

    def _open(self) -> Source:
        from torch_ckpt.checkpoint.source import Source

        source = Source(self.path, self._options)
        source.open()
        if not source.is_sealed_by(self._seal):
            source.close()
            raise CheckpointError(
                f"{self.path}: another save has replaced the checkpoint that this save wrote; read "
                "it before the next save"
            )
        return source

    @cached_property
    def _gaps(self) -> dict[str, str]:
        with self.source() as source:
            return _index_of(source).uncovered()


def split_into_boxes(shape: tuple[int, ...], max_elements: int) -> Iterator[Box]:
    """Splits a tensor into boxes of at most ``max_elements`` elements, in row-major order."""
    if 0 in shape:
        return
    if not shape:
        yield (), ()
        return
    # The dimension to cut. Boxes have size 1 in all dimensions before it.
    cut = 0
    while math.prod(shape[cut + 1 :]) > max_elements:
        cut += 1
    step = max(1, max_elements // math.prod(shape[cut + 1 :]))
    for lead in itertools.product(*(range(length) for length in shape[:cut])):
        for begin in range(0, shape[cut], step):
            count = min(step, shape[cut] - begin)
            offsets = (*lead, begin, *(0 for _ in shape[cut + 1 :]))
            yield offsets, (*(1 for _ in lead), count, *shape[cut + 1 :])


def _index_of(source: Source) -> _core.CheckpointIndex:
    assert source.index is not None
    return source.index


def _require_inside(name: str, shape: tuple[int, ...], box: Box) -> None:
    offsets, sizes = box
    if len(offsets) == len(sizes) == len(shape) and all(
        offset >= 0 and 0 <= size <= length - offset
        for offset, size, length in zip(offsets, sizes, shape, strict=True)
    ):
        return
    raise ValueError(
        f"{name} has the shape {[*shape]}, so it has no box of the sizes {[*sizes]} at the offsets "
        f"{[*offsets]}"
    )
