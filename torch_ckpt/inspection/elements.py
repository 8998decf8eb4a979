"""Elements of tensors: conversions for ``diff`` and ``show``, and dtypes that only torch reads."""

from __future__ import annotations

import torch

#: Dtypes whose elements need separate scales, which only torch.load can read.
QUANTIZED = {
    getattr(torch, name)
    for name in ("quint8", "qint8", "qint32", "quint4x2", "quint2x4")
    if hasattr(torch, name)
}


def as_int64(values: torch.Tensor) -> torch.Tensor:
    """Converts integers to int64. Larger values of uint64 wrap to negative ones."""
    return values.view(torch.int64) if values.dtype == torch.uint64 else values.to(torch.int64)


def as_float64(values: torch.Tensor) -> torch.Tensor:
    """Converts values to float64. Handles uint64 by way of int64."""
    if values.dtype != torch.uint64:
        return values.to(torch.float64)
    bits = values.view(torch.int64)
    return torch.where(bits < 0, bits.to(torch.float64) + 2.0**64, bits.to(torch.float64))


def widen(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if values.dtype == torch.uint64:
        return as_float64(values).to(dtype)
    return values.to(dtype)
