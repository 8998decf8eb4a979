"""Conversions between dtypes that lose precision or range, and the warning about them."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterable
from typing import NamedTuple

import torch

from torch_ckpt._base.formatting import MOST_NAMES
from torch_ckpt.loading.reading import Row


class LostPrecision:
    """The tensors that one load converts to a dtype with less precision or range."""

    def __init__(self) -> None:
        self._narrowed: dict[str, tuple[torch.dtype, torch.dtype]] = {}

    def note(self, rows: Iterable[Row]) -> None:
        """Records the tensors in the rows that lose precision or range."""
        self.note_conversions((row[0], row[4], row[8].dtype) for row in rows)

    def note_conversions(self, conversions: Iterable[tuple[str, torch.dtype, torch.dtype]]) -> None:
        """Records the (name, stored dtype, target dtype) tuples that lose precision or range."""
        for name, stored, target in conversions:
            if stored is not target and loses_precision(stored, target):
                self._narrowed[name] = (stored, target)

    def warn(self) -> None:
        """Warns once about all recorded tensors, and forgets them."""
        narrowed, self._narrowed = self._narrowed, {}
        if not narrowed:
            return
        some = [f"{name} ({a} to {b})" for name, (a, b) in list(narrowed.items())[:MOST_NAMES]]
        more = f" and {len(narrowed) - len(some)} more" if len(narrowed) > len(some) else ""
        warnings.warn(
            "loading converts tensors to dtypes with less precision or range than the stored "
            f"dtypes: {', '.join(some)}{more}",
            stacklevel=3,
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
        digits = 1 - math.log2(floating.eps)
        return _Reach(digits, floating.tiny * floating.eps, floating.min, floating.max)
    whole = torch.iinfo(dtype)
    return _Reach(math.log2(whole.max + 1), 1, whole.min, whole.max)
