"""The reads of a load that one of torch's planners has planned, for ``dcp.load``."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
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
from torch.distributed.checkpoint.utils import find_state_dict_object

from torch_ckpt import _C, _core
from torch_ckpt._base.cycle_collector import no_gc
from torch_ckpt._base.planner_hooks import keeps_methods
from torch_ckpt.checkpoint.chunks import local_chunks, require_cover
from torch_ckpt.checkpoint.files import is_inside_checkpoint, outside_error
from torch_ckpt.checkpoint.objects import decode
from torch_ckpt.checkpoint.reading import Reading, writable
from torch_ckpt.checkpoint.source import Source
from torch_ckpt.errors import CheckpointError, Corrupt
from torch_ckpt.loading.shared_reads import read_independently, read_once
from torch_ckpt.options import ReadOptions

_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass
class PlannedReading(Reading):
    """The reads of one rank that a planner of torch, or one of its kind, has planned. The target of
    an object is an item of the planner.

    Attributes:
        planner: receives objects, and tensors if it overrides the hooks for them.
        to_commit: items and tensors to pass to the planner's commit_tensor.
    """

    planner: LoadPlanner = field(default_factory=DefaultLoadPlanner)
    to_commit: list[tuple[ReadItem, torch.Tensor]] = field(default_factory=list)

    def add_items(self, items: Iterable[ReadItem], metadata: Metadata) -> None:
        """Adds the items of the planner's plan.

        Raises:
            Corrupt: the metadata does not have the location of an item.
            Unsafe: an item's file lies outside the checkpoint directory.
        """
        storage = metadata.storage_data or {}
        direct = keeps_default_hooks(self.planner)
        known: set[str] = set()
        for item in items:
            name = item.storage_index.fqn
            info = location_of(item, storage)
            if info.relative_path not in known and not is_inside_checkpoint(info.relative_path):
                raise outside_error(name, info.relative_path)
            known.add(info.relative_path)
            is_transformed = bool(info.transform_descriptors)
            if item.type == LoadItemType.BYTE_IO:
                read = _core.ObjectRead(name, info.relative_path, info.offset, info.length, item)
                (self.transformed if is_transformed else self.objects).append(read)
                continue
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
                is_transformed,
            )
            if not direct:
                self.to_commit.append((item, target))

    def store(self, read: _core.ObjectRead, data: bytes, allow_pickle: bool) -> None:
        load_object(self.planner, read.target, io.BytesIO(data), read.file, allow_pickle)


class PlannedReads:
    """The reads of one rank's plan.

    Args:
        metadata: the metadata from which the planner has made the plan.
    """

    def __init__(
        self, source: Source, items: list[ReadItem], planner: LoadPlanner, metadata: Metadata
    ) -> None:
        self._source = source
        self._items = items
        self._planner = planner
        self._metadata = metadata

    def read(self) -> None:
        """Makes the reads.

        Raises:
            see :meth:`Source.read`.
        """
        if keeps_default_hooks(self._planner):
            self._source.read(self._prepare())
        else:
            self._read_by_hooks()

    def read_once(self, group: dist.ProcessGroup | None) -> None:
        """Makes the reads of all ranks, which share what several of them want."""
        # The ranks must also exchange their failures.
        if keeps_default_hooks(self._planner):
            read_once(self._source, self._prepare, group)
        else:
            read_independently(self._source, self._read_by_hooks, group)

    def _prepare(self) -> PlannedReading:
        require_complete(self._planner, self._items, self._metadata)
        self._fill_with_zeros()
        return self._reading(self._items)

    def _read_by_hooks(self) -> None:
        self._fill_with_zeros()
        # Read items one by one: the user's hooks run on this thread, in the order of the plan, and
        # each resolve_tensor is followed by its commit_tensor.
        for item in self._items:
            reading = self._reading([item])
            self._source.read(reading)
            for planned, target in reading.to_commit:
                self._planner.commit_tensor(planned, target)

    def _reading(self, items: list[ReadItem]) -> PlannedReading:
        reading = PlannedReading(planner=self._planner)
        with no_gc():
            reading.add_items(items, self._metadata)
        return reading

    def _fill_with_zeros(self) -> None:
        if self._source.size_rule == _C.SizeRule.SAME:
            return
        state_dict = getattr(self._planner, "state_dict", None)
        if not isinstance(state_dict, dict):
            raise CheckpointError(
                "zero_fill and allow_shape_mismatch need a planner with a state_dict attribute "
                f"that is a dict, as in torch's planners; {type(self._planner).__name__} has none"
            )
        zero_what_is_not_stored(state_dict, self._metadata)


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


def require_complete(planner: LoadPlanner, items: Sequence[ReadItem], metadata: Metadata) -> None:
    """Raises Corrupt if the plan of torch's own planner leaves part of any tensor unread."""
    hooks = ("create_local_plan", "create_global_plan", "finish_plan")
    if not keeps_methods(planner, DefaultLoadPlanner, hooks):
        return  # a user's planner may leave out parts on purpose
    assert isinstance(planner, DefaultLoadPlanner)
    known = metadata.state_dict_metadata.keys()
    targets = planner.state_dict
    complete = set()
    for item in items:
        name = item.dest_index.fqn
        value: Any = targets.get(name)
        is_complete = type(value) in _PLAIN and value.shape == item.lengths
        if is_complete or item.type == LoadItemType.BYTE_IO:
            complete.add(name)
    in_parts = known - complete
    parts = {name: value for name, value in targets.items() if name in in_parts}
    if parts:
        require_cover(metadata, parts, (i for i in items if i.dest_index.fqn in parts))


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


class GrowingSize(tuple[int, ...]):
    """Size of a stored tensor. It compares equal to every size that is at least as large in each
    dimension.

    This makes torch's planners accept larger targets: they refuse a target whose size is not equal
    to the stored size.
    """

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, tuple)
            and len(other) == len(self)
            and all(has <= wants for has, wants in zip(self, other, strict=True))
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__

    def numel(self) -> int:
        """Returns the number of elements, as torch.Size does."""
        return torch.Size(self).numel()


class AnySize(GrowingSize):
    """Size of a stored tensor. It compares equal to every size with as many dimensions."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, tuple) and len(other) == len(self)

    __hash__ = tuple.__hash__


def let_sizes_differ(metadata: Metadata, options: ReadOptions) -> None:
    """Converts the sizes of all tensors in the metadata, so that torch's planners accept the
    targets that the options allow."""
    kind: Any = AnySize if options.allow_shape_mismatch else GrowingSize
    for stored in metadata.state_dict_metadata.values():
        if isinstance(stored, TensorStorageMetadata):
            stored.size = kind(stored.size)


def zero_what_is_not_stored(state_dict: dict[str, Any], metadata: Metadata) -> None:
    """Zeroes the regions of the tensors in a flat state dict that are not stored."""
    for name, value in state_dict.items():
        stored = metadata.state_dict_metadata.get(name)
        if not isinstance(stored, TensorStorageMetadata) or not hasattr(value, "size"):
            continue
        size = tuple(stored.size)
        if size == tuple(value.size()):
            continue
        for number, chunk in enumerate(local_chunks(value)):
            index = MetadataIndex(name, chunk.offsets, number)
            local = find_state_dict_object({name: value}, index)
            with writable(local):
                _zero_outside(local.detach(), chunk.offsets, size)


def _zero_outside(local: torch.Tensor, offsets: torch.Size, size: tuple[int, ...]) -> None:
    """Zeroes the part of a shard at ``offsets`` that lies outside the stored region, [0, size)."""
    for dim, (offset, stored) in enumerate(zip(offsets, size, strict=True)):
        length = local.size(dim)
        kept = min(max(stored - offset, 0), length)
        local.narrow(dim, kept, length - kept).zero_()
        local = local.narrow(dim, 0, kept)
