"""Whole tensors of a checkpoint, read in boxes, and objects: for what looks at checkpoints."""

from __future__ import annotations

import io
import itertools
import math
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from torch_ckpt.checkpoint.objects import decode
from torch_ckpt.errors import CheckpointError, Corrupt
from torch_ckpt.inspection.verify import fault_of_shards
from torch_ckpt.loading.reader import FileSystemReader
from torch_ckpt.loading.reading import Row

#: Offsets and sizes, by dimension.
Box = tuple[tuple[int, ...], tuple[int, ...]]

#: Their values are more than their bytes: scales, which only torch.load knows to read.
QUANTIZED = {
    getattr(torch, name)
    for name in ("quint8", "qint8", "qint32", "quint4x2", "quint2x4")
    if hasattr(torch, name)
}


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint, as its metadata says."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Record(NamedTuple):
    """A record, in bytes; of a tensor's shard its place in the tensor, too."""

    file: str
    offset: int
    length: int
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


class StoredTensors:
    """A checkpoint that is read box by box of whole tensors, however it is sharded.

    Holds the directory open; ``reader.release()`` lets go of it.

    Args:
        path: of its directory, as :func:`open_checkpoint` accepts it.
        max_inflight_bytes: most memory in bytes that reading takes beyond its targets.
        allow_pickle: as for :class:`FileSystemReader`.

    Raises:
        FileNotFoundError, Unsafe, Corrupt, OSError: its metadata cannot be read.
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
        self._metadata, self._index = self.reader.read_index()
        #: Of the checkpoint's directory.
        self.path = self.reader.location
        self.reader.set_up_for_load(0, self._metadata, self._index)
        self._uncovered = set(self._index.uncovered())
        #: Fully qualified names, in the checkpoint's order.
        self.names: list[str] = self._index.names()
        # Of a large tensor many boxes are asked for, one after the other.
        self._last: tuple[str | None, list[Record]] = None, []

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def paths(self) -> dict[str, Any]:
        """Where each value lay in the nested state dict, if its planner has told."""
        paths = self._metadata.planner_data
        return paths if isinstance(paths, dict) else {}

    def tensor(self, name: str) -> StoredTensor | None:
        """What is stored under the name, where it is a tensor.

        Raises:
            Corrupt: its shards do not cover it, which would compare what is not there.
        """
        found = self._index.tensor(name)
        if found is None:
            return None
        fault = None
        if name in self._uncovered:
            fault = fault_of_shards(found[1], self._index.shards(name))
        if fault:
            raise Corrupt(f"{self.path}: {name}: {fault}; run torch-ckpt verify on it")
        return StoredTensor(getattr(torch, found[0]), found[1])

    def bytes_of(self, name: str) -> int:
        """Of a tensor's elements; 0 of an object."""
        found = self._index.tensor(name)
        return 0 if found is None else math.prod(found[1]) * getattr(torch, found[0]).itemsize

    def places(self, name: str) -> list[Record]:
        """Where the shards of a tensor, or an object, are stored.

        Raises:
            Corrupt, CheckpointError: nowhere, or by way of a stream transform.
        """
        if self._last[0] == name:
            return self._last[1]
        places = []
        for offsets, sizes, file, offset, length, is_transformed in self._index.shards(name):
            if file is None:
                raise Corrupt(
                    f"{self.path}: {name}: the metadata does not say where it is stored; "
                    "run torch-ckpt verify on it"
                )
            if is_transformed:
                raise CheckpointError(
                    f"{self.path}: {name}: it is stored by way of a stream transform, which "
                    "only a load can undo"
                )
            places.append(Record(file, offset, length, offsets, sizes))
        self._last = name, places
        return places

    def rows(self, name: str, box: Box, target: torch.Tensor, files: dict[str, int]) -> list[Row]:
        """What fills the target with a box of a tensor."""
        found = self._index.tensor(name)
        assert found is not None
        rows: list[Row] = []
        for place in self.places(name):
            begins = [max(x, y) for x, y in zip(box[0], place.offsets, strict=True)]
            ends = [
                min(x + n, y + m)
                for x, n, y, m in zip(*box, place.offsets, place.sizes, strict=True)
            ]
            if any(begin >= end for begin, end in zip(begins, ends, strict=True)):
                continue
            part = target
            for dim, (begin, end) in enumerate(zip(begins, ends, strict=True)):
                part = part.narrow(dim, begin - box[0][dim], end - begin)
            rows.append(
                (
                    name,
                    files.setdefault(place.file, len(files)),
                    place.offset,
                    place.length,
                    getattr(torch, found[0]),
                    place.sizes,
                    tuple(x - y for x, y in zip(begins, place.offsets, strict=True)),
                    tuple(x - y for x, y in zip(ends, begins, strict=True)),
                    part,
                )
            )
        return rows

    def object(self, name: str) -> Any:
        """What is stored under the name, of harmless types unless ``allow_pickle`` was given.

        Raises:
            Corrupt, Unsafe, CheckpointError, OSError: it cannot be read, or is of other types.
        """
        (place,) = self.places(name)
        before = self.reader.max_inflight_bytes
        # An object is read whole, whatever it takes.
        self.reader.max_inflight_bytes = before + 2 * place.length
        try:
            row = (name, 0, place.offset, place.length)
            (data,) = self.reader.read_bytes([place.file], [row])
        finally:
            self.reader.max_inflight_bytes = before
        if self.reader.allow_pickle:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        return decode(data, name, place.file)

    def record_pieces(self, name: str, place: Record, at_once: int) -> Iterator[bytes]:
        """The stored bytes of a record, as they are."""
        if place.length <= at_once // 2:
            row = (name, 0, place.offset, place.length)
            yield self.reader.read_bytes([place.file], [row])[0]
            return
        # Of a part of an object nothing is known to compare it with.
        before, self.reader.verify = self.reader.verify, False
        try:
            step = at_once // 2
            for begin in range(0, place.length, step):
                row = (name, 0, place.offset + begin, min(step, place.length - begin))
                yield self.reader.read_bytes([place.file], [row])[0]
        finally:
            self.reader.verify = before


def empty(sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """As torch.empty, which not every dtype has."""
    count = math.prod(sizes) * dtype.itemsize
    return torch.empty(count, dtype=torch.uint8, device="cpu").view(dtype).view(sizes)


def boxes(shape: tuple[int, ...], most: int) -> Iterator[Box]:
    """Boxes of at most so many elements, in order, that make up a tensor."""
    if 0 in shape:
        return
    if not shape:
        yield (), ()
        return
    cut = 0  # the dimension in which boxes are cut; of those before it they have one index each
    while math.prod(shape[cut + 1 :]) > most:
        cut += 1
    step = max(1, most // math.prod(shape[cut + 1 :]))
    for lead in itertools.product(*(range(length) for length in shape[:cut])):
        for begin in range(0, shape[cut], step):
            count = min(step, shape[cut] - begin)
            offsets = (*lead, begin, *(0 for _ in shape[cut + 1 :]))
            yield offsets, (*(1 for _ in lead), count, *shape[cut + 1 :])


def as_int64(values: torch.Tensor) -> torch.Tensor:
    """As int64; of uint64 those above its range are negative."""
    return values.view(torch.int64) if values.dtype == torch.uint64 else values.to(torch.int64)


def as_float64(values: torch.Tensor) -> torch.Tensor:
    if values.dtype != torch.uint64:
        return values.to(torch.float64)
    bits = values.view(torch.int64)
    return torch.where(bits < 0, bits.to(torch.float64) + 2.0**64, bits.to(torch.float64))


def widened(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if values.dtype == torch.uint64:
        return as_float64(values).to(dtype)
    return values.to(dtype)
