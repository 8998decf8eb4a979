"""The reads of one rank, and the calls of torch's planners that find their targets."""

from __future__ import annotations

import io
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from torch_ckpt import _C, _core
from torch_ckpt._base.planner_hooks import keeps_methods
from torch_ckpt.checkpoint.chunks import require_cover
from torch_ckpt.checkpoint.files import lies_beneath, outside
from torch_ckpt.checkpoint.objects import decode
from torch_ckpt.errors import Corrupt
from torch_ckpt.loading.zero_fill import writable

T = TypeVar("T")

_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass
class Reading:
    """The reads of one rank.

    Attributes:
        planner: torch's planner, or one of its kind, which receives objects, and tensors if it
            overrides the hooks for them; None if there is nothing for it.
        values: the state dict that receives the objects whose target is a path.
        tensors: the tensors that the engine reads.
        objects: the objects. Their target is a path in ``values`` or an item of the planner.
        transformed: items written through a stream transform; torch's own code reads them.
        to_commit: items and tensors to pass to the planner's commit_tensor.
    """

    planner: LoadPlanner | None = None
    values: dict[str, Any] = field(default_factory=dict)
    tensors: _C.TensorReads = field(default_factory=_C.TensorReads)
    objects: list[_core.ObjectRead] = field(default_factory=list)
    transformed: list[ReadItem] = field(default_factory=list)
    to_commit: list[tuple[ReadItem, torch.Tensor]] = field(default_factory=list)

    def add_items(self, items: Iterable[ReadItem], metadata: Metadata) -> None:
        """Adds the items of a plan of torch's planner.

        Raises:
            Corrupt: the metadata does not have the location of an item.
            Unsafe: an item's file lies outside the checkpoint directory.
        """
        assert self.planner is not None
        storage = metadata.storage_data or {}
        direct = keeps_default_hooks(self.planner)
        known: set[str] = set()
        for item in items:
            name = item.storage_index.fqn
            info = location_of(item, storage)
            if info.relative_path not in known and not lies_beneath(info.relative_path):
                raise outside(name, info.relative_path)
            known.add(info.relative_path)
            if info.transform_descriptors:
                self.transformed.append(item)
            elif item.type == LoadItemType.BYTE_IO:
                self.objects.append(
                    _core.ObjectRead(name, info.relative_path, info.offset, info.length, item)
                )
            else:
                target = target_of(self.planner, item, direct)
                dtype, chunk = _stored(item.storage_index, metadata)
                self.tensors.add(
                    name,
                    info.relative_path,
                    info.offset,
                    info.length,
                    dtype,
                    chunk.sizes,
                    item.storage_offsets,
                    item.lengths,
                    target,
                )
                if not direct:
                    self.to_commit.append((item, target))

    def store(self, read: _core.ObjectRead, data: bytes, allow_pickle: bool) -> None:
        """Decodes an object that has been read, and stores it in its target."""
        if isinstance(read.target, ReadItem):
            assert self.planner is not None
            load_object(self.planner, read.target, io.BytesIO(data), read.file, allow_pickle)
        elif allow_pickle:
            value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
            set_element(self.values, read.target, value)
        else:
            set_element(self.values, read.target, decode(data, read.name, read.file))


class PlansByEngine(ABC):
    """A planner that lets the engine plan, and gives torch only a placeholder for a plan."""

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
        self.bytes = 0
        self._is_elsewhere = False

    def __call__(self) -> int:
        return time.monotonic_ns() if self._is_elsewhere else self.bytes

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Block in which other code reads, or waits for ranks, without reporting its progress. The
        block always counts as progress."""
        self._is_elsewhere = True
        try:
            yield
        finally:
            self._is_elsewhere = False


# --- torch's planners ----------------------------------------------------------------------------


class SafePlanner:
    """Wraps a planner for torch's own code, so that loading objects runs no code from the
    checkpoint.

    Args:
        storage: the locations of the items, from the metadata.
    """

    def __init__(self, planner: LoadPlanner, storage: Mapping[MetadataIndex, _StorageInfo]) -> None:
        self._planner = planner
        self._storage = storage
        self.resolve_tensor = planner.resolve_tensor
        self.commit_tensor = planner.commit_tensor

    def load_bytes(self, item: ReadItem, stored: io.BytesIO) -> None:
        """Decodes an object and passes it to the planner."""
        file = location_of(item, self._storage).relative_path
        load_object(self._planner, item, stored, file, False)


def load_object(
    planner: LoadPlanner, item: ReadItem, stored: io.BytesIO, file: str, allow_pickle: bool
) -> None:
    """Passes an object to a planner.

    torch's load_bytes unpickles any bytes, so this function replaces it unless ``allow_pickle`` is
    True. If a user's planner overrides load_bytes, it receives the bytes only after they have
    passed the safety check.
    """
    if not allow_pickle:
        value = decode(stored.getbuffer(), item.storage_index.fqn, file)
        if keeps_methods(planner, DefaultLoadPlanner, ("load_bytes",)):
            assert isinstance(planner, DefaultLoadPlanner)
            target = item.dest_index.fqn
            if planner.flatten_state_dict:
                set_element(planner.original_state_dict, planner.mappings[target], value)
            else:
                planner.state_dict[target] = value
            return
    planner.load_bytes(item, stored)


def location_of(item: ReadItem, storage: Mapping[MetadataIndex, _StorageInfo]) -> _StorageInfo:
    """Returns the location of an item.

    Raises:
        Corrupt: the metadata does not have the location.
    """
    index = item.storage_index
    info = storage.get(index)
    if info is None:
        raise Corrupt(
            f"{index.fqn}: the metadata gives no location for the shard at offset "
            f"{tuple(index.offset) if index.offset else 0}; the save that wrote it was incomplete"
        )
    return info


def keeps_default_hooks(planner: LoadPlanner) -> bool:
    """Returns True if the planner overrides none of the hooks for tensors.

    Then commit_tensor need not be called, because torch's implementation does nothing.
    """
    hooks = ("resolve_tensor", "lookup_tensor", "transform_tensor", "commit_tensor")
    return keeps_methods(planner, DefaultLoadPlanner, hooks)


def target_of(planner: LoadPlanner, item: ReadItem, direct: bool) -> torch.Tensor:
    """Returns the tensor to read into.

    Args:
        direct: the result of :func:`keeps_default_hooks`. If it is True, complete plain tensors
            are looked up directly, ten times as fast as by resolve_tensor.
    """
    if direct:
        value = planner.state_dict.get(item.dest_index.fqn)  # type: ignore[attr-defined]
        if type(value) in _PLAIN and value.shape == item.lengths:
            return cast(torch.Tensor, value.detach())
    return planner.resolve_tensor(item).detach()


def require_whole(planner: LoadPlanner, items: Sequence[ReadItem], metadata: Metadata) -> None:
    """Raises Corrupt if the plan of torch's own planner leaves part of any tensor unread."""
    hooks = ("create_local_plan", "create_global_plan", "finish_plan")
    if not keeps_methods(planner, DefaultLoadPlanner, hooks):
        return  # a user's planner may leave out parts on purpose
    assert isinstance(planner, DefaultLoadPlanner)
    known = metadata.state_dict_metadata
    targets = planner.state_dict
    whole = set()
    for item in items:
        name = item.dest_index.fqn
        value: Any = targets.get(name)
        is_whole = type(value) in _PLAIN and value.shape == item.lengths
        if is_whole or item.type == LoadItemType.BYTE_IO:
            whole.add(name)
    rest = {name: value for name, value in targets.items() if name not in whole and name in known}
    if rest:
        require_cover(metadata, rest, (i for i in items if i.dest_index.fqn in rest))


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


# --- reads ---------------------------------------------------------------------------------------


def copy_by_torch(data: bytes, read: _C.TensorRead) -> None:
    """Decodes a tensor that only torch.load can decode, such as a quantized tensor, and copies it
    into the target.

    Args:
        data: the record.

    Raises:
        Corrupt: torch.load cannot decode the record, or the shape differs from the metadata.
    """
    where = f"{read.name}: the record in {read.file} at byte {read.offset}"
    try:
        stored = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise Corrupt(
            f"{where} is not a plain tensor, and torch.load cannot read it safely: {error}"
        ) from error
    if not isinstance(stored, torch.Tensor) or stored.shape != read.sizes:
        kind = type(stored).__name__
        shape = f" of shape {list(stored.shape)}" if hasattr(stored, "shape") else ""
        raise Corrupt(
            f"{where} holds a {kind}{shape}, but the metadata describes a tensor of shape "
            f"{list(read.sizes)}"
        )
    stored = narrow_tensor_by_index(stored, read.region_offsets, read.region_lengths)
    with writable(read.tensor):
        read.tensor.copy_(stored)


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
