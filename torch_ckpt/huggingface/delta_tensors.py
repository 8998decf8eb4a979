"""Applies a delta to the tensors of a state dict."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor

from torch_ckpt import _core
from torch_ckpt._base.formatting import some_of
from torch_ckpt.checkpoint.tensor_bytes import as_bytes
from torch_ckpt.errors import CheckpointError


def apply_to_tensors(delta: _core.Delta, state_dict: Mapping[str, Any]) -> None:
    """Changes the tensors of a state dict. Args and raises: see :func:`torch_ckpt.apply_delta`."""
    values, _ = flatten_state_dict(dict(state_dict))
    wanted = delta.tensors()
    missing = [name for name, _, _ in wanted if name not in values]
    if missing:
        raise CheckpointError(
            f"the state dict lacks tensors that the delta changes: {some_of(missing, 5)}"
        )
    tensors = [_plain(name, values[name], dtype, sizes) for name, dtype, sizes in wanted]
    _refuse_overlaps(dict(zip((name for name, _, _ in wanted), tensors, strict=True)))
    # Tied tensors share a copy.
    copies: dict[Any, torch.Tensor] = {}
    hosts = [copies.setdefault(_view_of(tensor), as_bytes(tensor).cpu()) for tensor in tensors]
    delta.apply([_memory_of(host) for host in hosts])
    for tensor, host in zip(tensors, hosts, strict=True):
        # Inference tensors can be changed only in inference mode.
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            if host.data_ptr() != tensor.data_ptr():
                tensor.copy_(host.view(tensor.dtype).view(tensor.shape))
            elif not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)


def _view_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns a key that is the same for two views of the same elements."""
    layout = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
    return (*layout, tensor.is_conj(), tensor.is_neg())


def _refuse_overlaps(tensors: dict[str, torch.Tensor]) -> None:
    """Raises ValueError if tensors share memory without being the same view."""
    ranges = []
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            continue
        strides = zip(tensor.shape, tensor.stride(), strict=True)
        if any(size > 1 and stride == 0 for size, stride in strides):
            raise ValueError(f"{name}: several elements of the tensor share memory")
        last = sum((s - 1) * t for s, t in zip(tensor.shape, tensor.stride(), strict=True))
        begin = tensor.data_ptr()
        end = begin + (last + 1) * tensor.itemsize
        ranges.append((str(tensor.device), begin, end, name))
    ranges.sort()
    for (device, _, end, one), (other_device, begin, _, other) in itertools.pairwise(ranges):
        is_separate = device != other_device or end <= begin
        if not is_separate and _view_of(tensors[one]) != _view_of(tensors[other]):
            raise ValueError(
                f"{other}: the tensor shares memory with {one}; load the version instead"
            )


def _plain(name: str, value: Any, dtype: str, sizes: list[int]) -> torch.Tensor:
    """Returns the plain tensor to change, which has this dtype and shape."""
    if isinstance(value, DTensor):
        if any(placement.is_shard() or placement.is_partial() for placement in value.placements):
            raise CheckpointError(
                f"{name}: apply_delta cannot change a sharded DTensor; load the version instead"
            )
        value = value.to_local()
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or (
        value.layout != torch.strided or value.is_meta
    ):
        raise CheckpointError(f"{name}: apply_delta can change only dense tensors with data")
    if str(value.dtype) != f"torch.{dtype}" or list(value.shape) != sizes:
        raise CheckpointError(
            f"{name}: the tensor has dtype {value.dtype} and shape {list(value.shape)}, but the "
            f"version's has dtype torch.{dtype} and shape {sizes}"
        )
    tensor: torch.Tensor = value
    return tensor


def _memory_of(host: torch.Tensor) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * host.numel()).from_address(host.data_ptr())
