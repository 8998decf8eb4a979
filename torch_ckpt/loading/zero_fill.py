"""Loads into tensors that are larger than stored (``zero_fill``), or that have any shape with the
same number of dimensions (``allow_shape_mismatch``)."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import find_state_dict_object

from torch_ckpt.checkpoint.chunks import local_chunks
from torch_ckpt.checkpoint.reading import writable
from torch_ckpt.options import ReadOptions


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
