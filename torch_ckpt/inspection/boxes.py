"""Boxes of tensors, and conversions of their values, for ``diff``, ``show`` and ``convert``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch

from torch_ckpt.checkpoint.opened import Box

#: Dtypes whose elements need separate scales, which only torch.load can read.
QUANTIZED = {
    getattr(torch, name)
    for name in ("quint8", "qint8", "qint32", "quint4x2", "quint2x4")
    if hasattr(torch, name)
}


def split_into_boxes(shape: tuple[int, ...], max_elements: int) -> Iterator[Box]:
    """Splits a tensor into boxes of at most ``max_elements`` elements, in row-major order."""
    if 0 in shape:
        return
    if not shape:
        yield (), ()
        return
    # The dimension to cut. Boxes have size 1 in all dimensions before it.
    cut = 0
    while math.prod(shape[cut + 1 :]) > max_elements:
        cut += 1
    step = max(1, max_elements // math.prod(shape[cut + 1 :]))
    for lead in itertools.product(*(range(length) for length in shape[:cut])):
        for begin in range(0, shape[cut], step):
            count = min(step, shape[cut] - begin)
            offsets = (*lead, begin, *(0 for _ in shape[cut + 1 :]))
            yield offsets, (*(1 for _ in lead), count, *shape[cut + 1 :])


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
