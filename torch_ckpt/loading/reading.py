"""The reads of one rank: what is read from a checkpoint into which targets."""

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

#: One tensor to read: name; file number, offset and length of its record in bytes; dtype and shape
#: of the stored tensor; offsets and lengths of the wanted region (empty: all of it); target.
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


#: One object to read: name, file number, offset and length of its record in bytes.
ByteRow = tuple[str, int, int, int]


class Reading:
    """The reads of one rank.

    Attributes:
        planner: the planner, which gets objects, and tensors if it has hooks for them.
        match: the tensors that the engine has planned.
        files: names relative to the checkpoint's directory, with the numbers that rows use.
        rows: the other tensors.
        byte_items: objects and their locations.
        transformed: items for torch's own code, because they were written through a stream
            transform.
        to_commit: tensors to pass to the planner's commit_tensor.
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
        """Returns the number of a file that holds a tensor of the given name.

        Raises:
            Unsafe: the file lies outside of the checkpoint's directory.
        """
        if file not in self.files:
            if not lies_beneath(file):
                raise outside(name, file)
            self.files[file] = len(self.files)
        return self.files[file]

    def expand(self) -> None:
        """Turns the engine's plan into rows, for callers that read tensors one by one."""
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
        """Adds items of the planner's plan.

        Args:
            storage: the locations of the items, from the metadata.

        Raises:
            Corrupt: the metadata does not have the location of an item.
            Unsafe: an item lies outside of the checkpoint's directory.
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
        """Adds the reads of another object, for this one's planner."""
        names = list(other.files)
        self.rows.extend(
            (row[0], self.number(names[row[1]], row[0]), *row[2:]) for row in other.rows
        )
        self.byte_items.extend(other.byte_items)
        self.transformed.extend(other.transformed)
        self.to_commit.extend(other.to_commit)


class PlansOnIndex(ABC):
    """A planner that lets the engine plan from the index; the plans that it returns to torch are
    empty."""

    @abstractmethod
    def has_planned(self) -> bool:
        """Returns True if the engine has planned; with other readers torch's planner does."""

    @abstractmethod
    def begun(self) -> Reading:
        """Returns the reads, after allocating memory for their targets."""


class BytesMoved:
    """Counts the bytes that a load has moved, for the heartbeat of a rank that reads.

    A call returns a number that changes for as long as the load makes progress.
    """

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
        """A block in which other code reads or waits for ranks, without reporting its progress."""
        self._is_elsewhere = True
        try:
            yield
        finally:
            self._is_elsewhere = False


def copy_by_torch(data: bytes, row: Row, file: str) -> None:
    """Reads a tensor that only torch.load can decode: quantized tensors and subclasses, for
    example.

    Args:
        data: the record of the row.
        file: the file of the record.

    Raises:
        Corrupt: torch.load cannot decode it, or its shape is not that in the metadata.
        CheckpointError: it does not fit the target.
    """
    name, _number, offset, _length, _dtype, sizes, region_offsets, region_lengths, target = row
    where = f"{name}: the record in {file} at byte {offset}"
    try:
        stored = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise Corrupt(
            f"{where} is neither a plain tensor nor one that torch.load reads safely: {error}"
        ) from error
    if not isinstance(stored, torch.Tensor) or tuple(stored.shape) != tuple(sizes):
        kind = type(stored).__name__
        found = f"a {kind} of {list(stored.shape)}" if hasattr(stored, "shape") else f"a {kind}"
        raise Corrupt(f"{where} holds {found}, not the tensor of {list(sizes)} in the metadata")
    if region_lengths:
        stored = narrow_tensor_by_index(stored, region_offsets, region_lengths)
    if target.size() != stored.size():
        raise CheckpointError(
            f"{name}: mismatch sizes: the target has {list(target.size())}, "
            f"the record {list(stored.size())}"
        )
    with writable(target):
        target.copy_(stored)


def _stored(index: MetadataIndex, metadata: Metadata) -> tuple[torch.dtype, ChunkStorageMetadata]:
    """Returns the dtype of a stored shard, and its offsets and sizes in the tensor."""
    stored = metadata.state_dict_metadata.get(index.fqn)
    if not isinstance(stored, TensorStorageMetadata):
        raise Corrupt(f"{index.fqn}: the metadata does not describe it as a tensor")
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
    """Returns the files with their checksum tables.

    Raises:
        Unsafe: a file lies outside of the checkpoint's directory.
    """
    for number, file in enumerate(files):
        if not lies_beneath(file):
            raise outside(next((row[0] for row in rows if row[1] == number), "a tensor"), file)
    return [(file, tables.get(file, b"")) for file in files]


def with_names_as_utf8(rows: list[Any]) -> list[Any]:
    """Escapes names that UTF-8 cannot encode. The engine uses names for messages only."""
    if all(row[0].isascii() for row in rows):
        return rows
    return [(row[0].encode(errors="backslashreplace").decode(), *row[1:]) for row in rows]


def in_waves(sizes: Iterable[tuple[T, int]], most: int) -> Iterator[list[T]]:
    """Groups things that are in memory together: up to ``most`` bytes, or a single larger one."""
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
