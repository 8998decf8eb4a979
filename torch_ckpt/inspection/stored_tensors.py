"""Whole tensors of a checkpoint, read in boxes, and objects: for what looks at checkpoints."""

from __future__ import annotations

import io
import itertools
import math
import os
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

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


class StoredTensors:
    """A checkpoint that is read box by box of whole tensors, however it is sharded.

    Holds the directory open; ``reader.release()`` lets go of it.

    Args:
        path: of its directory.
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
        self.metadata: Metadata = self.reader.read_metadata()
        self.reader.set_up_for_load(0, metadata=self.metadata)
        self.entries: dict[str, Any] = self.metadata.state_dict_metadata

    def tensor(self, name: str) -> TensorStorageMetadata | None:
        """What is stored under the name, where it is a tensor.

        Raises:
            Corrupt: its shards do not cover it, which would compare what is not there.
        """
        entry = self.entries[name]
        if not isinstance(entry, TensorStorageMetadata):
            return None
        fault = fault_of_shards(tuple(entry.size), entry.chunks)
        if fault:
            raise Corrupt(f"{self.reader.path}: {name}: {fault}; run torch-ckpt verify on it")
        return entry

    def place(self, name: str, offsets: torch.Size | None = None) -> _StorageInfo:
        """Where a shard, or an object, is stored.

        Raises:
            Corrupt, CheckpointError: nowhere, or by way of a stream transform.
        """
        info = (self.metadata.storage_data or {}).get(MetadataIndex(name, offsets))
        if info is None:
            raise Corrupt(
                f"{self.reader.path}: {name}: the metadata does not say where it is stored; "
                "run torch-ckpt verify on it"
            )
        if info.transform_descriptors:
            raise CheckpointError(
                f"{self.reader.path}: {name}: it is stored by way of a stream transform, which "
                "only a load can undo"
            )
        return cast(_StorageInfo, info)

    def rows(self, name: str, box: Box, target: torch.Tensor, files: dict[str, int]) -> list[Row]:
        """What fills the target with a box of a tensor."""
        entry = self.entries[name]
        rows: list[Row] = []
        for chunk in entry.chunks:
            begins = [max(x, y) for x, y in zip(box[0], chunk.offsets, strict=True)]
            ends = [
                min(x + n, y + m)
                for x, n, y, m in zip(*box, chunk.offsets, chunk.sizes, strict=True)
            ]
            if any(begin >= end for begin, end in zip(begins, ends, strict=True)):
                continue
            part = target
            for dim, (begin, end) in enumerate(zip(begins, ends, strict=True)):
                part = part.narrow(dim, begin - box[0][dim], end - begin)
            info = self.place(name, chunk.offsets)
            rows.append(
                (
                    name,
                    files.setdefault(info.relative_path, len(files)),
                    info.offset,
                    info.length,
                    entry.properties.dtype,
                    tuple(chunk.sizes),
                    tuple(x - y for x, y in zip(begins, chunk.offsets, strict=True)),
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
        info = self.place(name)
        before = self.reader.max_inflight_bytes
        # An object is read whole, whatever it takes.
        self.reader.max_inflight_bytes = before + 2 * info.length
        try:
            row = (name, 0, info.offset, info.length)
            (data,) = self.reader.read_bytes([info.relative_path], [row])
        finally:
            self.reader.max_inflight_bytes = before
        if self.reader.allow_pickle:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        return decode(data, name, info.relative_path)

    def record_pieces(self, name: str, info: _StorageInfo, at_once: int) -> Iterator[bytes]:
        """The stored bytes of a record, as they are."""
        if info.length <= at_once // 2:
            row = (name, 0, info.offset, info.length)
            yield self.reader.read_bytes([info.relative_path], [row])[0]
            return
        # Of a part of an object nothing is known to compare it with.
        before, self.reader.verify = self.reader.verify, False
        try:
            step = at_once // 2
            for begin in range(0, info.length, step):
                row = (name, 0, info.offset + begin, min(step, info.length - begin))
                yield self.reader.read_bytes([info.relative_path], [row])[0]
        finally:
            self.reader.verify = before


def empty(sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """As torch.empty, which not every dtype has."""
    count = math.prod(sizes) * dtype.itemsize
    return torch.empty(count, dtype=torch.uint8).view(dtype).view(sizes)


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
