"""The reads of one rank: which data of a checkpoint is read into which targets."""

from __future__ import annotations

import io
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from torch_ckpt import _C
from torch_ckpt.checkpoint.files import lies_beneath, outside
from torch_ckpt.errors import CheckpointError, Corrupt
from torch_ckpt.loading.planners import keeps_default_hooks, place_of, target_of
from torch_ckpt.loading.zero_fill import writable

T = TypeVar("T")

#: A tensor to read: name; file number, byte offset and byte length of the record; dtype and shape
#: of the stored tensor; offsets and lengths of the wanted region (empty for the complete tensor);
#: target.
Row = tuple[
    str,
    int,
    int,
    int,
    torch.dtype,
    "tuple[int, ...]",
    "tuple[int, ...]",
    "tuple[int, ...]",
    torch.Tensor,
]


#: An object to read: name; file number, byte offset and byte length of the record.
ByteRow = tuple[str, int, int, int]


class Reading:
    """The reads of one rank.

    Attributes:
        planner: the planner. Objects are passed to it, and tensors if it overrides the hooks for
            them.
        match: the engine's plan for the tensors that it reads.
        files: file numbers, as used in ``rows``, by file name relative to the checkpoint directory.
        rows: the tensors to read that are not in ``match``.
        byte_items: objects and their locations.
        transformed: items written through a stream transform; torch's own code reads them.
        to_commit: items and tensors to pass to the planner's commit_tensor.
    """

    def __init__(self, planner: LoadPlanner) -> None:
        self.planner = planner
        self.match: _C.LoadMatch | None = None
        self.files: dict[str, int] = {}
        self.rows: list[Row] = []
        self.byte_items: list[tuple[ReadItem, _StorageInfo]] = []
        self.transformed: list[ReadItem] = []
        self.to_commit: list[tuple[ReadItem, torch.Tensor]] = []

    def number(self, file: str, name: str) -> int:
        """Returns the number of a file, and adds the file if it is new.

        Args:
            name: name of a tensor in the file, for the error message.

        Raises:
            Unsafe: the file lies outside the checkpoint directory.
        """
        if file not in self.files:
            if not lies_beneath(file):
                raise outside(name, file)
            self.files[file] = len(self.files)
        return self.files[file]

    def expand(self) -> None:
        """Converts the engine's plan into rows, for callers that need one row per tensor."""
        match, self.match = self.match, None
        if match is not None:
            files = match.files()
            self.rows.extend(
                (row[0], self.number(files[row[1]], row[0]), *row[2:]) for row in match.rows()
            )

    def add_items(
        self,
        items: Iterable[ReadItem],
        metadata: Metadata,
        storage: Mapping[MetadataIndex, _StorageInfo],
    ) -> None:
        """Adds the items of a plan of torch's planner.

        Args:
            storage: the locations of the items, from the metadata.

        Raises:
            Corrupt: the metadata does not have the location of an item.
            Unsafe: an item's file lies outside the checkpoint directory.
        """
        direct = keeps_default_hooks(self.planner)
        for item in items:
            name = item.storage_index.fqn
            info = place_of(item, storage)
            if info.transform_descriptors or item.type == LoadItemType.BYTE_IO:
                if not lies_beneath(info.relative_path):
                    raise outside(name, info.relative_path)
                if info.transform_descriptors:
                    self.transformed.append(item)
                else:
                    self.byte_items.append((item, info))
                continue
            target = target_of(self.planner, item, direct)
            dtype, chunk = _stored(item.storage_index, metadata)
            self.rows.append(
                (
                    name,
                    self.number(info.relative_path, name),
                    info.offset,
                    info.length,
                    dtype,
                    chunk.sizes,
                    item.storage_offsets,
                    item.lengths,
                    target,
                )
            )
            if not direct:
                self.to_commit.append((item, target))

    def add(self, other: Reading) -> None:
        """Adds the reads of another ``Reading``. They use this object's planner."""
        names = list(other.files)
        self.rows.extend(
            (row[0], self.number(names[row[1]], row[0]), *row[2:]) for row in other.rows
        )
        self.byte_items.extend(other.byte_items)
        self.transformed.extend(other.transformed)
        self.to_commit.extend(other.to_commit)


class PlansOnIndex(ABC):
    """A planner that lets the engine plan from the index, and gives torch only a dummy plan."""

    @abstractmethod
    def has_planned(self) -> bool:
        """Returns True if the engine has planned, and False if torch's planner has."""

    @abstractmethod
    def begin(self) -> Reading:
        """Allocates memory for the targets and returns the reads."""


class BytesMoved:
    """Counts the bytes that a load has moved. Calling the object returns a number that changes as
    long as the load makes progress; a rank that reads sends heartbeats based on it."""

    def __init__(self) -> None:
        self._bytes = 0
        self._is_elsewhere = False

    def __call__(self) -> int:
        return time.monotonic_ns() if self._is_elsewhere else self._bytes

    def add(self, count: int) -> None:
        """Adds bytes that have been moved."""
        self._bytes += count

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Block in which other code reads, or waits for ranks, without reporting its progress. The
        block always counts as progress."""
        self._is_elsewhere = True
        try:
            yield
        finally:
            self._is_elsewhere = False


def copy_by_torch(data: bytes, row: Row, file: str) -> None:
    """Decodes a tensor that only torch.load can decode, such as a quantized tensor, and copies it
    into the target.

    Args:
        data: the record of the row.
        file: the file of the record.

    Raises:
        Corrupt: torch.load cannot decode the record, or the shape differs from the metadata.
        CheckpointError: the target has a different shape.
    """
    name, _number, offset, _length, _dtype, sizes, region_offsets, region_lengths, target = row
    where = f"{name}: the record in {file} at byte {offset}"
    try:
        stored = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise Corrupt(
            f"{where} is not a plain tensor, and torch.load cannot read it safely: {error}"
        ) from error
    if not isinstance(stored, torch.Tensor) or tuple(stored.shape) != tuple(sizes):
        kind = type(stored).__name__
        shape = f" of shape {list(stored.shape)}" if hasattr(stored, "shape") else ""
        raise Corrupt(
            f"{where} holds a {kind}{shape}, but the metadata describes a tensor of shape "
            f"{list(sizes)}"
        )
    if region_lengths:
        stored = narrow_tensor_by_index(stored, region_offsets, region_lengths)
    if target.size() != stored.size():
        raise CheckpointError(
            f"{name}: size mismatch: the target has shape {list(target.size())}, the stored tensor "
            f"{list(stored.size())}"
        )
    with writable(target):
        target.copy_(stored)


def _stored(index: MetadataIndex, metadata: Metadata) -> tuple[torch.dtype, ChunkStorageMetadata]:
    """Returns the dtype of a stored shard and the region of the tensor that it covers."""
    stored = metadata.state_dict_metadata.get(index.fqn)
    if not isinstance(stored, TensorStorageMetadata):
        raise Corrupt(f"{index.fqn}: the metadata does not describe a tensor of this name")
    chunks = stored.chunks
    hint = index.index
    if index.offset is None and len(chunks) == 1:
        return stored.properties.dtype, chunks[0]
    if hint is not None and hint < len(chunks) and chunks[hint].offsets == index.offset:
        return stored.properties.dtype, chunks[hint]
    for chunk in chunks:
        if chunk.offsets == index.offset:
            return stored.properties.dtype, chunk
    raise Corrupt(f"{index.fqn}: the metadata has no shard at offset {index.offset}")


def places_of(
    files: list[str], rows: Sequence[Row] | Sequence[ByteRow], tables: Mapping[str, bytes]
) -> list[tuple[str, bytes]]:
    """Returns each file with its checksum table.

    Raises:
        Unsafe: a file lies outside the checkpoint directory.
    """
    for number, file in enumerate(files):
        if not lies_beneath(file):
            raise outside(next((row[0] for row in rows if row[1] == number), "a tensor"), file)
    return [(file, tables.get(file, b"")) for file in files]


def with_names_as_utf8(rows: list[Any]) -> list[Any]:
    """Returns the rows with names that UTF-8 can encode. The engine only uses names in messages."""
    if all(row[0].isascii() for row in rows):
        return rows
    return [(row[0].encode(errors="backslashreplace").decode(), *row[1:]) for row in rows]


def in_waves(sizes: Iterable[tuple[T, int]], most: int) -> Iterator[list[T]]:
    """Groups items into waves of at most ``most`` bytes. A larger item gets a wave of its own."""
    wave: list[T] = []
    held = 0
    for thing, size in sizes:
        if wave and held + size > most:
            yield wave
            wave, held = [], 0
        wave.append(thing)
        held += size
    if wave:
        yield wave
