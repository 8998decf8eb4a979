"""The reads of a load on one rank, and the records that only torch can decode."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint._traverse import set_element

from torch_ckpt import _C, _core
from torch_ckpt.checkpoint.objects import decode
from torch_ckpt.errors import Corrupt

T = TypeVar("T")


@dataclass
class Reading:
    """The reads of one rank.

    Attributes:
        values: the state dict that receives the objects.
        tensors: the tensors.
        objects: the objects. Their target is a path in ``values``.
        transformed: the objects whose records were written through a stream transform.
    """

    values: dict[str, Any] = field(default_factory=dict)
    tensors: _C.TensorReads = field(default_factory=_C.TensorReads)
    objects: list[_core.ObjectRead] = field(default_factory=list)
    transformed: list[_core.ObjectRead] = field(default_factory=list)

    def store(self, read: _core.ObjectRead, data: bytes, allow_pickle: bool) -> None:
        """Decodes an object that has been read, and stores it in its target."""
        if allow_pickle:
            value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        else:
            value = decode(data, read.name, read.file)
        set_element(self.values, read.target, value)


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


def writable(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Context manager for writing into a tensor; inference tensors need inference mode."""
    return torch.inference_mode() if tensor.is_inference() else nullcontext()
