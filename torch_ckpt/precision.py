"""Which conversions between dtypes lose something."""

from __future__ import annotations

import functools
import math

import torch


@functools.cache
def loses_precision(stored: torch.dtype, target: torch.dtype) -> bool:
    """Whether the target cannot hold every value of the stored dtype.

    Bits types, which have no values, are taken to hold whatever they are converted from.
    """
    if stored == target or stored == torch.bool:
        return False
    if target == torch.bool or (stored.is_complex and not target.is_complex):
        return True
    try:
        stored_digits, stored_low, stored_high = _reach(stored)
        target_digits, target_low, target_high = _reach(target)
    except (TypeError, RuntimeError):
        return False
    return stored_digits > target_digits or stored_low < target_low or stored_high > target_high


def _reach(dtype: torch.dtype) -> tuple[float, float, float]:
    """Significant binary digits, the lowest and the highest number."""
    if dtype.is_complex:
        dtype = dtype.to_real()
    if dtype.is_floating_point:
        floating = torch.finfo(dtype)
        return 1 - math.log2(floating.eps), floating.min, floating.max
    whole = torch.iinfo(dtype)
    return math.log2(whole.max + 1), whole.min, whole.max
