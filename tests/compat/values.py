"""The values in the samples. Never change them: the samples of earlier releases contain them."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int8,
    torch.int64,
    torch.uint8,
    torch.bool,
)


def model(step: int) -> dict[str, Any]:
    """Returns plain tensors. Two steps differ in some elements of one tensor."""
    weight = torch.arange(600, dtype=torch.float32).reshape(20, 30)
    weight[:2] += step
    return {"weight": weight, "bias": torch.arange(30).to(torch.bfloat16)}


def whole() -> dict[str, Any]:
    """Returns the tensors of :func:`sharded` as plain tensors."""
    weight = torch.arange(70, dtype=torch.float32).reshape(7, 10)
    return {"rows": weight, "columns": weight + 100, "replicas": weight + 200}


def sharded(mesh: DeviceMesh) -> dict[str, Any]:
    """Returns DTensors on a mesh of one dimension. Its ranks hold different numbers of rows."""
    placements = {"rows": Shard(0), "columns": Shard(1), "replicas": Replicate()}
    return {
        name: distribute_tensor(tensor, mesh, [placements[name]])
        for name, tensor in whole().items()
    }


def state() -> dict[str, Any]:
    """Returns tensors of many kinds, and objects."""
    tensors = {str(dtype).removeprefix("torch."): torch.arange(6).to(dtype) for dtype in DTYPES}
    return {
        "dtypes": tensors,
        "transposed": torch.arange(12).reshape(3, 4).t(),
        "conjugated": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "objects": {"step": 7, "name": "a sample", "rates": [0.1, 0.01], "nothing": None},
        "list": [torch.full((2,), 5), {"deep": torch.full((2,), 6)}],
    }


def emptied(value: Any) -> Any:
    """Returns the same structure, with zeros for tensors and None for objects."""
    if isinstance(value, dict):
        return {key: emptied(item) for key, item in value.items()}
    if isinstance(value, list) and any(isinstance(item, (torch.Tensor, dict)) for item in value):
        return [emptied(item) for item in value]
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    return None
