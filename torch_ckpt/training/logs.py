"""Scalars and histograms of a training step.

1. Every rank walks its tree and looks at names and kinds, never at values.
2. Every rank takes part in making DTensors whole, also when it has found something to refuse: the
   others wait for it.
3. Only then what cannot be logged is refused, on every rank that has it.
4. Rank 0 fetches what lies on CUDA devices, waiting for each device once, and logs.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import operator
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, SupportsIndex, TypeAlias, cast

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from torch_ckpt._base.formatting import printable
from torch_ckpt.ranks.meeting import own_rank

# More of them would hide each other.
_MOST_REFUSALS = 10

# What every buffer's start is a multiple of: no dtype's elements are larger.
_ALIGNMENT = 16

# Of a histogram that is computed here.
_BARS = 64


class SummaryLogger(Protocol):
    """The part of ``torch.utils.tensorboard.SummaryWriter`` that :func:`log` uses."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> object:
        """Takes one number of a step."""

    def add_histogram(self, tag: str, values: torch.Tensor, global_step: int, /) -> object:
        """Takes all values of a tensor of a step."""


class ReportLogger(Protocol):
    """The part of ``clearml.Logger`` that :func:`log` uses; it draws histograms and counts none."""

    def report_scalar(self, title: str, series: str, value: float, iteration: int) -> object:
        """Takes one number of a step."""

    def report_histogram(
        self,
        title: str,
        series: str,
        values: Sequence[int | float],
        iteration: int | None = None,
        *,
        xlabels: list[str] | None = None,
    ) -> object:
        """Takes the heights of a histogram's bars of a step."""


# Quoted, for Python 3.10 cannot subscript LoggerAdapter.
Logger: TypeAlias = (
    "SummaryLogger | ReportLogger | logging.Logger | logging.LoggerAdapter[Any] | None"
)


def log(step: SupportsIndex, logger: Logger, output: Any) -> None:
    """Logs what a step gave, on rank 0.

    Collective where the tree holds DTensors: all ranks of their meshes call it, with the same ones
    in the same order. What else other ranks hold is not looked at beyond its kind.

    Args:
        step: its number.
        logger: on rank 0; others ignore theirs. One with ``add_scalar`` and ``add_histogram``, as
            ``torch.utils.tensorboard.SummaryWriter``; or with ``report_scalar`` and
            ``report_histogram``, as ``clearml.Logger``; or a ``logging.Logger``, which gets one
            record of level INFO; or None for one line on standard output.
        output: a tree of mappings, lists, tuples and dataclasses. Numbers and tensors without
            dimensions are scalars; other tensors and numpy arrays are histograms of their
            elements. Names are the keys on the way, joined by "/". Values may lie on any device. Of
            a histogram only finite values are counted; how many others there are becomes the
            scalar ``name/nonfinite``, where there are any.

    Raises:
        ValueError: the tree holds what cannot be logged; it is named, and nothing was logged.
        TypeError: ``logger`` is none of the above (on rank 0), or ``step`` is not an integer.
    """
    number = operator.index(step)
    refusals: list[str] = []
    entries = list(_entries(output, refusals))
    here = own_rank() == 0
    values = _values(entries, here)
    if refusals:
        raise ValueError(_refusal(number, refusals))
    if not here:
        return
    if logger is None:
        print(_line(number, values), flush=True)
    elif isinstance(logger, (logging.Logger, logging.LoggerAdapter)):
        logger.info("%s", _line(number, values), stacklevel=2)
    else:
        _summarize(number, logger, values)


# --- what there is -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Entry:
    name: str
    value: float | torch.Tensor


class _Refused(Exception):
    """Says what a leaf is that cannot be logged."""


def _entries(output: Any, refusals: list[str]) -> Iterator[_Entry]:
    """What can be logged, in the tree's order; adds to ``refusals`` what cannot."""
    names: set[str] = set()
    for name, leaf in _leaves(output, ""):
        name = name or "output"
        if name in names:
            refusals.append(f"{name!r}: two values have this name")
        names.add(name)
        try:
            yield _Entry(name, _loggable(leaf))
        except _Refused as refused:
            refusals.append(f"{name!r}: {refused}")


def _leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    children = _children(tree)
    if children is None:
        yield name, tree
        return
    for key, child in children:
        yield from _leaves(child, f"{name}/{key}" if name else str(key))


def _children(tree: Any) -> Iterator[tuple[Any, Any]] | None:
    """Of a node; None for a leaf."""
    if isinstance(tree, Mapping):
        return iter(tree.items())
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return zip(tree._fields, tree, strict=True)
    if isinstance(tree, (list, tuple, deque)):
        return enumerate(tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return ((field.name, getattr(tree, field.name)) for field in dataclasses.fields(tree))
    return None


def _loggable(leaf: Any) -> float | torch.Tensor:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(leaf, numpy.generic):
        leaf = leaf.item()
    elif numpy is not None and isinstance(leaf, numpy.ndarray):
        try:
            # A copy: torch takes no negative strides, and warns of what it may not write to.
            leaf = torch.from_numpy(leaf.copy())
        except TypeError:
            raise _Refused(f"a numpy array of {leaf.dtype}") from None
    if isinstance(leaf, torch.Tensor):
        _require_values(leaf)
        return leaf
    if not isinstance(leaf, (int, float)):
        raise _Refused("None" if leaf is None else f"a {type(leaf).__qualname__}")
    try:
        float(leaf)
    except OverflowError:
        raise _Refused("an int that is too large for a float") from None
    return leaf


def _require_values(tensor: torch.Tensor) -> None:
    """Raises unless it holds real numbers that rank 0 can get."""
    if not isinstance(tensor, DTensor) and _is_wrapper(tensor):
        raise _Refused(f"a {type(tensor).__qualname__}")
    if tensor.is_quantized or not _is_real(tensor.dtype):
        raise _Refused(f"a tensor of {tensor.dtype}")
    if tensor.layout != torch.strided or tensor.is_nested:
        raise _Refused("a nested tensor" if tensor.is_nested else f"a tensor of {tensor.layout}")
    if tensor.device.type == "meta":
        raise _Refused("a tensor on the meta device, which has no values")
    if tensor.numel() == 0:
        raise _Refused(f"a tensor of shape {tuple(tensor.shape)}, which has no elements")
    if isinstance(tensor, DTensor) and not bool((tensor.device_mesh.mesh == 0).any()):
        raise _Refused(f"a DTensor on {tensor.device_mesh}, which rank 0 is not in")


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether it may hold its values elsewhere, in a way that is not known here."""
    # A functional collective's result waits for its values at any use of it.
    if isinstance(tensor, AsyncCollectiveTensor):
        return False
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


@functools.cache
def _is_real(dtype: torch.dtype) -> bool:
    if dtype.is_complex:
        return False
    try:
        torch.zeros(1, dtype=dtype).to(torch.float32)
    except (RuntimeError, TypeError):  # float4_e2m1fn_x2, bits8 and their like
        return False
    return True


def _refusal(step: int, refusals: Sequence[str]) -> str:
    shown = refusals[:_MOST_REFUSALS]
    more = len(refusals) - len(shown)
    return (
        f"step {step} cannot be logged: {'; '.join(shown)}"
        + (f"; and {more} more" if more else "")
        + ". Scalars are numbers and tensors without dimensions, histograms dense tensors of real "
        "numbers: take the rest out of the output, or convert it"
    )


# --- their values --------------------------------------------------------------------------------

Value = float | torch.Tensor


@torch.no_grad()
def _values(entries: Sequence[_Entry], here: bool) -> list[tuple[str, Value]]:
    """Numbers, and tensors on the CPU; on ranks that are not ``here`` nothing: they take part."""
    tensors = [entry.value for entry in entries if isinstance(entry.value, torch.Tensor)]
    on_cuda = [tensor for tensor in tensors if tensor.device.type == "cuda"]
    rooms = iter(_rooms(on_cuda, pinned=True) if here and on_cuda else [])
    fetched: list[tuple[str, Value]] = []
    for entry in entries:
        value = entry.value
        if isinstance(value, DTensor):
            if value.device_mesh.get_coordinate() is None:
                continue
            # One after the other, so that a device holds one of them at a time.
            value = value.full_tensor()
        if not here:
            continue
        if isinstance(value, torch.Tensor):
            on_device = value.device.type == "cuda"
            value = next(rooms).copy_(value, non_blocking=True) if on_device else value.cpu()
        fetched.append((entry.name, value))
    if here:
        for device in {tensor.device for tensor in on_cuda}:
            torch.cuda.current_stream(device).synchronize()
    return [(name, _number(value)) for name, value in fetched]


def _rooms(tensors: Sequence[torch.Tensor], pinned: bool) -> list[torch.Tensor]:
    """Host tensors like these, in one allocation: pinned memory is slow to get."""
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.numel() * tensor.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    memory = torch.empty(end, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    return [
        memory[start : start + tensor.numel() * tensor.dtype.itemsize]
        .view(tensor.dtype)
        .view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=True)
    ]


def _number(value: Value) -> Value:
    return value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value


# --- where they go -------------------------------------------------------------------------------


class _Reports:
    """A logger with report_scalar and report_histogram as one with add_scalar and add_histogram."""

    def __init__(self, logger: ReportLogger) -> None:
        self._logger = logger

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> None:
        self._logger.report_scalar(title=tag, series=tag, value=scalar_value, iteration=global_step)

    def add_histogram(self, tag: str, values: torch.Tensor, global_step: int, /) -> None:
        # The distance of two float32 may be larger than any float32.
        counts, edges = torch.histogram(values.double(), _BARS)
        middles = (edges[:-1] + edges[1:]) / 2
        self._logger.report_histogram(
            title=tag,
            series=tag,
            values=counts.long().tolist(),
            iteration=global_step,
            xlabels=[f"{middle:.8g}" for middle in middles.tolist()],
        )


def _summary(logger: Any) -> SummaryLogger:
    def has(*methods: str) -> bool:
        return all(callable(getattr(logger, method, None)) for method in methods)

    if has("add_scalar", "add_histogram"):
        return cast(SummaryLogger, logger)
    if has("report_scalar", "report_histogram"):
        return _Reports(logger)
    raise TypeError(
        f"logger is a {type(logger).__qualname__}, which has neither add_scalar and add_histogram "
        "nor report_scalar and report_histogram: pass a torch.utils.tensorboard.SummaryWriter, a "
        "clearml.Logger, a logging.Logger or None"
    )


def _summarize(step: int, logger: Any, values: Sequence[tuple[str, Value]]) -> None:
    summary = _summary(logger)
    for name, value in values:
        try:
            if not isinstance(value, torch.Tensor):
                summary.add_scalar(name, float(value), step)
                continue
            finite, others = _finite(value)
            if finite.numel():
                summary.add_histogram(name, finite, step)
            if others:
                summary.add_scalar(f"{name}/nonfinite", float(others), step)
        except ValueError as error:
            raise ValueError(f"step {step}: the logger does not take {name!r}: {error}") from error


def _line(step: int, values: Sequence[tuple[str, Value]]) -> str:
    parts = [f"{printable(name)}={_text(value)}" for name, value in values]
    return f"step {step}" + (f": {', '.join(parts)}" if parts else "")


def _text(value: Value) -> str:
    if isinstance(value, int):
        return str(int(value))  # also of a bool
    if isinstance(value, float):
        return f"{value:.6g}"
    finite, others = _finite(value)
    parts = [f"n={finite.numel()}"]
    if finite.numel():
        deviation, mean = torch.std_mean(finite, correction=0)
        smallest, largest = torch.aminmax(finite)
        figures = {"mean": mean, "std": deviation, "min": smallest, "max": largest}
        parts = [f"{name}={figure.item():.6g}" for name, figure in figures.items()] + parts
    return "{" + ", ".join(parts + ([f"nonfinite={others}"] if others else [])) + "}"


def _finite(values: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The finite ones in one dimension, as floats, and how many others there are."""
    narrow = values.dtype.is_floating_point and values.dtype.itemsize <= 4
    floats = values.flatten().to(torch.float32 if narrow else torch.float64)
    finite = floats[torch.isfinite(floats)]
    return finite, floats.numel() - finite.numel()
