"""Reads boxes of tensors, and objects, from a checkpoint for ``diff``, ``show`` and ``convert``."""

from __future__ import annotations

import io
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import add, sub
from typing import Any, NamedTuple

import torch

from torch_ckpt import _C, _core
from torch_ckpt.checkpoint.objects import decode
from torch_ckpt.checkpoint.tensor_bytes import empty_tensor
from torch_ckpt.errors import CheckpointError, Corrupt
from torch_ckpt.loading.reader import FileSystemReader

#: Offsets and sizes of a region of a tensor, one per dimension.
Box = tuple[tuple[int, ...], tuple[int, ...]]

#: Dtypes whose elements need separate scales, which only torch.load can read.
QUANTIZED = {
    getattr(torch, name)
    for name in ("quint8", "qint8", "qint32", "quint4x2", "quint2x4")
    if hasattr(torch, name)
}


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


class StoredTensors:
    """Reads boxes of a checkpoint's tensors, regardless of the sharding.

    Keeps the directory open until ``close()``.

    Args:
        path: the checkpoint, as for :func:`open_checkpoint`.
        max_inflight_bytes: memory limit of the reader in bytes, not counting the targets.
        allow_pickle: unpickle objects of any type; see :class:`FileSystemReader`.

    Raises:
        FileNotFoundError, Unsafe, Corrupt, OSError: the metadata cannot be read.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        max_inflight_bytes: int,
        allow_pickle: bool = False,
    ) -> None:
        self.reader = FileSystemReader(
            path, max_inflight_bytes=max_inflight_bytes, allow_pickle=allow_pickle
        )
        self._metadata, self._index = self.reader.open()
        #: The checkpoint directory.
        self.path = self.reader.location
        self._gaps = self._index.uncovered()
        #: Fully qualified names, in the checkpoint's order.
        self.names: list[str] = self._index.names()
        # The last result of records(), because many boxes of one tensor are read in succession.
        self._last_records: tuple[str | None, list[Record]] = None, []

    def close(self) -> None:
        """Closes the directory. Further calls do nothing."""
        self.reader.release()

    def __contains__(self, name: str) -> bool:
        return name in self._index

    @property
    def safetensors_metadata(self) -> dict[str, str] | None:
        """The metadata of safetensors files; None if the checkpoint has another format."""
        return self.reader.safetensors_metadata

    def paths(self) -> dict[str, Any]:
        """Returns the path of each name in the nested state dict; empty if not recorded."""
        paths = self._metadata.planner_data
        return paths if isinstance(paths, dict) else {}

    def tensor(self, name: str) -> StoredTensor | None:
        """Returns the dtype and shape of a tensor; None if the name is an object.

        Raises:
            Corrupt: the shards do not cover the tensor.
        """
        found = self._index.tensor(name)
        if found is None:
            return None
        if name in self._gaps:
            raise Corrupt(
                f"{self.path}: {name}: {self._gaps[name]}. Run torch-ckpt verify on the checkpoint"
            )
        return StoredTensor(getattr(torch, found[0]), found[1])

    def tensor_bytes(self, name: str) -> int:
        """Returns the size of the complete tensor in bytes; 0 for an object."""
        found = self._index.tensor(name)
        return 0 if found is None else math.prod(found[1]) * getattr(torch, found[0]).itemsize

    def records(self, name: str) -> list[Record]:
        """Returns the locations of a tensor's shards, or of an object.

        Raises:
            Corrupt: the metadata does not locate every record.
            CheckpointError: a record was stored through a stream transform.
        """
        if self._last_records[0] == name:
            return self._last_records[1]
        records = []
        for offsets, sizes, file, offset, length, is_transformed in self._index.shards(name):
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
        self._last_records = name, records
        return records

    def read_boxes(
        self,
        boxes: Sequence[tuple[str, Box]],
        allocate: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] = empty_tensor,
    ) -> list[torch.Tensor]:
        """Reads boxes of tensors, given as names and boxes, into tensors from ``allocate``."""
        reads = _C.TensorReads()
        targets = []
        for name, (offsets, sizes) in boxes:
            found = self._index.tensor(name)
            assert found is not None
            dtype = getattr(torch, found[0])
            target = allocate(sizes, dtype)
            targets.append(target)
            for record in self.records(name):
                begins = [*map(max, offsets, record.offsets)]
                ends = [*map(min, map(add, offsets, sizes), map(add, record.offsets, record.sizes))]
                lengths = [*map(sub, ends, begins)]
                if any(length <= 0 for length in lengths):
                    continue
                part = target
                for dim, length in enumerate(lengths):
                    part = part.narrow(dim, begins[dim] - offsets[dim], length)
                reads.add(
                    name,
                    record.file,
                    record.offset,
                    record.length,
                    dtype,
                    record.sizes,
                    [*map(sub, begins, record.offsets)],
                    part.shape,
                    part,
                )
        if len(reads):
            self.reader.read_tensors(reads)
        return targets

    def read_object(self, name: str) -> Any:
        """Reads an object; only allow-listed types unless ``allow_pickle`` is True.

        Raises:
            Corrupt, CheckpointError, OSError: the object cannot be read.
            Unsafe: the object contains a type that is not allow-listed.
        """
        (record,) = self.records(name)
        # An object cannot be read in parts, so raise the limit by the memory that it needs.
        limit = self.reader.options.max_inflight_bytes + 2 * record.length
        with self._with_options(max_inflight_bytes=limit):
            (data,) = self.reader.read_bytes(
                [_core.ObjectRead(name, record.file, record.offset, record.length)]
            )
        if self.reader.allow_pickle:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        return decode(data, name, record.file)

    def read_chunks(self, name: str, record: Record, max_bytes: int) -> Iterator[bytes]:
        """Yields the stored bytes of a record, at most ``max_bytes // 2`` at a time."""
        chunk = max_bytes // 2
        # An object's checksum covers all of its bytes, so it cannot verify one chunk.
        verify = self.reader.options.verify and record.length <= chunk
        with self._with_options(verify=verify):
            for begin in range(0, record.length, chunk):
                count = min(chunk, record.length - begin)
                read = _core.ObjectRead(name, record.file, record.offset + begin, count)
                yield self.reader.read_bytes([read])[0]

    @contextmanager
    def _with_options(self, **changes: Any) -> Iterator[None]:
        """Block in which the reader reads with other options."""
        before = self.reader.options
        self.reader.options = replace(before, **changes)
        try:
            yield
        finally:
            self.reader.options = before


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


def as_int64(values: torch.Tensor) -> torch.Tensor:
    """Converts integers to int64. Larger values of uint64 wrap to negative ones."""
    return values.view(torch.int64) if values.dtype == torch.uint64 else values.to(torch.int64)


def as_float64(values: torch.Tensor) -> torch.Tensor:
    """Converts values to float64. Handles uint64 by way of int64."""
    if values.dtype != torch.uint64:
        return values.to(torch.float64)
    bits = values.view(torch.int64)
    return torch.where(bits < 0, bits.to(torch.float64) + 2.0**64, bits.to(torch.float64))


def widen(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if values.dtype == torch.uint64:
        return as_float64(values).to(dtype)
    return values.to(dtype)
