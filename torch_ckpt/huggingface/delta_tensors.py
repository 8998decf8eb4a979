"""Applies a delta to the tensors of a state dict."""

from __future__ import annotations

import ctypes
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
    # Tied tensors share a copy, so that the engine detects different values for them.
    by_memory: dict[Any, torch.Tensor] = {}
    hosts = []
    for tensor in tensors:
        memory = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
        hosts.append(by_memory.setdefault(memory, as_bytes(tensor).cpu()))
    with torch.no_grad():
        delta.apply([_memory_of(host) for host in hosts])
        for tensor, host in zip(tensors, hosts, strict=True):
            if host.data_ptr() != tensor.data_ptr():
                tensor.copy_(host.view(tensor.dtype).view(tensor.shape))
            else:
                torch.autograd.graph.increment_version(tensor)


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
