"""Names of dtypes, and conversions between dtypes that lose precision or range."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from torch_ckpt import _C
from torch_ckpt._base.formatting import some_of
from torch_ckpt._base.log import warn

#: Stored dtype and target dtype of tensors, by name.
Conversions = dict[str, tuple[torch.dtype, torch.dtype]]

#: Abbreviated dtype names.
_SHORT_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def parse_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Returns a floating-point dtype by name, such as "bf16", "bfloat16" or "float8_e4m3fn".

    Raises:
        ValueError: there is no floating-point dtype with this name.
    """
    name = _SHORT_NAMES.get(dtype, dtype) if isinstance(dtype, str) else None
    found = dtype if name is None else getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(
            f"dtype must be a floating-point dtype such as bf16, fp16 or fp32, got {dtype!r}"
        )
    return found


def lost_precision(reads: _C.TensorReads) -> Conversions:
    """Returns the tensors that lose precision or range."""
    return {
        name: (stored, target)
        for name, stored, target in reads.conversions()
        if loses_precision(stored, target)
    }


def warn_of_lost_precision(narrowed: Conversions) -> None:
    """Warns once about all these tensors."""
    conversions = [f"{name} ({a} to {b})" for name, (a, b) in narrowed.items()]
    warn(
        "loading converts tensors to dtypes with less precision or range than the stored "
        f"dtypes: {some_of(conversions)}"
    )


@functools.cache
def loses_precision(stored: torch.dtype, target: torch.dtype) -> bool:
    """Returns True if the target dtype cannot represent every finite number of the stored dtype.

    Conversions from or to types that do not hold numbers, such as ``torch.bits8``, count as exact.
    """
    if stored == target:
        return False
    if target == torch.bool or (stored.is_complex and not target.is_complex):
        return True
    try:
        has, holds = _reach(stored), _reach(target)
    except (TypeError, RuntimeError):
        return False
    return (
        has.digits > holds.digits
        or has.least < holds.least
        or has.low < holds.low
        or has.high > holds.high
    )


class _Reach(NamedTuple):
    """The numbers that a dtype can represent.

    Attributes:
        digits: significant binary digits.
        least: smallest positive number.
        low, high: lowest and highest finite number.
    """

    digits: float
    least: float
    low: float
    high: float


def _reach(dtype: torch.dtype) -> _Reach:
    if dtype == torch.bool:
        return _Reach(1, 1, 0, 1)
    if dtype.is_complex:
        dtype = dtype.to_real()
    if dtype.is_floating_point:
        floating = torch.finfo(dtype)
        # The finfo of torch 2.11 has the eps of float8_e4m3fnuz for float8_e5m2fnuz.
        eps = 0.25 if dtype == torch.float8_e5m2fnuz else floating.eps
        return _Reach(1 - math.log2(eps), floating.tiny * eps, floating.min, floating.max)
    whole = torch.iinfo(dtype)
    return _Reach(math.log2(whole.max + 1), 1, whole.min, whole.max)
