"""Logs scalars and histograms of a training step.

1. Every rank walks its tree and checks names and types, but not values.
2. Every rank takes part in gathering the DTensors, even if it has leaves that cannot be logged,
   because the other ranks wait for it.
3. Ranks with such leaves raise an error.
4. Rank 0 copies tensors from CUDA devices, synchronizing once per device, and logs.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import operator
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, SupportsIndex, TypeAlias

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from torch_ckpt._base.formatting import printable
from torch_ckpt.ranks.group import own_rank

# Maximum number of problems in an error message.
_MAX_REFUSALS = 10


class SummaryLogger(Protocol):
    """The methods of ``torch.utils.tensorboard.SummaryWriter`` that :func:`log` uses.

    Example::

        training.log(step, SummaryWriter("run/logs"), {"loss": loss})
    """

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> object:
        """Logs a scalar for a step."""

    def add_histogram(self, tag: str, values: torch.Tensor, global_step: int, /) -> object:
        """Logs a histogram of a tensor's values for a step."""


# Quoted, because Python 3.10 cannot subscript LoggerAdapter.
Logger: TypeAlias = "SummaryLogger | logging.Logger | logging.LoggerAdapter[Any] | None"


def log(step: SupportsIndex, logger: Logger, output: Any) -> None:
    """Logs scalars and histograms for a training step, on rank 0.

    If ``output`` contains DTensors, the call is collective: all ranks in the DTensors' meshes must
    call this function with the same DTensors in the same order. For all other values, only the
    values on rank 0 are logged.

    Args:
        step: the step number.
        logger: rank 0's logger; the argument is ignored on other ranks. One of: an object with
            ``add_scalar`` and ``add_histogram``, such as ``torch.utils.tensorboard.SummaryWriter``;
            a ``logging.Logger``, which gets one record of level INFO; None, which prints one line
            to standard output.
        output: a tree of mappings, lists, tuples and dataclasses. Numbers and zero-dimensional
            tensors are logged as scalars; other tensors and numpy arrays are logged as histograms
            of their elements. A value's name consists of the keys on its path, joined by "/".
            Values can be on any device. Histograms count only finite values. If there are
            non-finite values, the number of non-finite values is logged as the scalar
            ``name/nonfinite``.

    Raises:
        ValueError: ``output`` contains values that cannot be logged; the message lists these
            values. Nothing was logged.
        TypeError: ``logger`` is none of the above (on rank 0), or ``step`` is not an integer.

    Example::

        training.log(step, SummaryWriter("run/logs"), {"loss": loss, "gradients": gradients})
    """
    number = operator.index(step)
    refusals: list[str] = []
    leaves = list(_convert_leaves(output, refusals))
    is_writer = own_rank() == 0
    values = _fetch_values(leaves, is_writer)
    if refusals:
        more = len(refusals) - _MAX_REFUSALS
        raise ValueError(
            f"step {number} cannot be logged: {'; '.join(refusals[:_MAX_REFUSALS])}"
            + (f"; and {more} more" if more > 0 else "")
            + ". Only numbers and dense tensors of real numbers can be logged. Remove or convert "
            "the other values"
        )
    if not is_writer:
        return
    if logger is None:
        print(_format_line(number, values), flush=True)
    elif isinstance(logger, (logging.Logger, logging.LoggerAdapter)):
        logger.info("%s", _format_line(number, values), stacklevel=2)
    else:
        _summarize(number, logger, values)


# --- names and types of values -------------------------------------------------------------------


Value = float | torch.Tensor


class _Refused(Exception):
    """Raised for a leaf that cannot be logged; the message describes the leaf."""


def _convert_leaves(output: Any, refusals: list[str]) -> Iterator[tuple[str, Value]]:
    """Yields the leaves that can be logged, in tree order; adds other leaves to ``refusals``."""
    names: set[str] = set()
    for name, leaf in _leaves(output, ""):
        name = name or "output"
        if name in names:
            refusals.append(f"{name!r}: two values have this name")
        names.add(name)
        try:
            yield name, _convert_leaf(leaf)
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
    """Returns the keys and children of a node; None for a leaf."""
    if isinstance(tree, Mapping):
        return iter(tree.items())
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return zip(tree._fields, tree, strict=True)
    if isinstance(tree, (list, tuple, deque)):
        return enumerate(tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return ((field.name, getattr(tree, field.name)) for field in dataclasses.fields(tree))
    return None


def _convert_leaf(leaf: Any) -> Value:
    """Converts a leaf to a number or tensor; raises _Refused if the leaf cannot be logged."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(leaf, numpy.generic):
        leaf = leaf.item()
    elif numpy is not None and isinstance(leaf, numpy.ndarray):
        try:
            # Copy the array: torch rejects negative strides and warns about read-only arrays.
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
    """Raises _Refused unless the tensor contains real numbers that rank 0 can read."""
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
        raise _Refused(f"a DTensor on {tensor.device_mesh}, which does not include rank 0")


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """True for tensor subclasses that may store their values elsewhere."""
    # A functional collective's result waits for its values when it is used.
    if isinstance(tensor, AsyncCollectiveTensor):
        return False
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


@functools.cache
def _is_real(dtype: torch.dtype) -> bool:
    if dtype.is_complex:
        return False
    try:
        torch.zeros(1, dtype=dtype).to(torch.float32)
    except (RuntimeError, TypeError):  # such as float4_e2m1fn_x2 and bits8
        return False
    return True


# --- values --------------------------------------------------------------------------------------


@torch.no_grad()
def _fetch_values(leaves: Sequence[tuple[str, Value]], is_writer: bool) -> list[tuple[str, Value]]:
    """Returns the values as numbers and CPU tensors on the writer.

    Other ranks only take part in gathering DTensors, and get an empty list.
    """
    devices = set()
    fetched: list[tuple[str, Value]] = []
    for name, value in leaves:
        if isinstance(value, DTensor):
            if value.device_mesh.get_coordinate() is None:
                continue
            # Gather one DTensor at a time, so that a device holds only one.
            value = value.full_tensor()
        if not is_writer:
            continue
        if isinstance(value, torch.Tensor):
            is_on_cuda = value.device.type == "cuda"
            devices |= {value.device} if is_on_cuda else set()
            # torch copies from CUDA to page-locked memory, which it keeps for later copies.
            value = value.to("cpu", non_blocking=is_on_cuda)
        fetched.append((name, value))
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return [
        (name, value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value)
        for name, value in fetched
    ]


# --- loggers -------------------------------------------------------------------------------------


def _summarize(step: int, logger: Any, values: Sequence[tuple[str, Value]]) -> None:
    if not all(callable(getattr(logger, name, None)) for name in ("add_scalar", "add_histogram")):
        raise TypeError(
            f"logger is a {type(logger).__qualname__}, which does not have add_scalar and "
            "add_histogram. Pass a torch.utils.tensorboard.SummaryWriter, a logging.Logger or None"
        )
    for name, value in values:
        try:
            if not isinstance(value, torch.Tensor):
                logger.add_scalar(name, float(value), step)
                continue
            finite, others = _split_finite(value)
            if finite.numel():
                logger.add_histogram(name, finite, step)
            if others:
                logger.add_scalar(f"{name}/nonfinite", float(others), step)
        except ValueError as error:
            raise ValueError(
                f"step {step}: the logger does not accept {name!r}: {error}"
            ) from error


def _format_line(step: int, values: Sequence[tuple[str, Value]]) -> str:
    parts = [f"{printable(name)}={_format_value(value)}" for name, value in values]
    return f"step {step}" + (f": {', '.join(parts)}" if parts else "")


def _format_value(value: Value) -> str:
    if isinstance(value, int):
        return str(int(value))  # True and False become 1 and 0
    if isinstance(value, float):
        return f"{value:.6g}"
    finite, others = _split_finite(value)
    parts = [f"n={finite.numel()}"]
    if finite.numel():
        deviation, mean = torch.std_mean(finite, correction=0)
        smallest, largest = torch.aminmax(finite)
        figures = {"mean": mean, "std": deviation, "min": smallest, "max": largest}
        parts = [f"{name}={figure.item():.6g}" for name, figure in figures.items()] + parts
    return "{" + ", ".join(parts + ([f"nonfinite={others}"] if others else [])) + "}"


def _split_finite(values: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Returns the finite values as a flat float tensor, and the number of other values."""
    narrow = values.dtype.is_floating_point and values.dtype.itemsize <= 4
    floats = values.flatten().to(torch.float32 if narrow else torch.float64)
    finite = floats[torch.isfinite(floats)]
    return finite, floats.numel() - finite.numel()
