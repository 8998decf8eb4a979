"""Logs scalars and histograms of a training step."""

from __future__ import annotations

import dataclasses
import functools
import logging
import operator
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, SupportsIndex, TypeAlias

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from torch_ckpt._base.formatting import printable, some_of
from torch_ckpt.ranks.group import own_rank


class SummaryLogger(Protocol):
    """The methods of ``torch.utils.tensorboard.SummaryWriter`` that :func:`log` uses."""

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
        logger: rank 0's logger; the argument is ignored on other ranks. An object with
            ``add_scalar`` and ``add_histogram``, such as ``torch.utils.tensorboard.SummaryWriter``;
            or a ``logging.Logger``, which gets one record of level INFO; or None, which prints one
            line to standard output.
        output: a tree of mappings, lists, tuples and dataclasses. Numbers and zero-dimensional
            tensors are logged as scalars; other tensors and numpy arrays are logged as histograms
            of their elements. A value's name consists of the keys on its path, joined by "/".
            Values can be on any device. Histograms count only finite values. The number of other
            values is logged as the scalar ``name/nonfinite``, unless it is 0.

    Raises:
        ValueError: ``output`` contains values that cannot be logged; the message lists these
            values. Nothing was logged.
        TypeError: ``step`` is not an integer.

    Example::

        training.log(step, SummaryWriter("run/logs"), {"loss": loss, "gradients": gradients})
    """
    number = operator.index(step)
    values: list[tuple[str, Any]] = []
    refused: list[str] = []
    names: set[str] = set()
    for name, leaf in _leaves(output, ""):
        if name in names:
            refused.append(f"{name!r}: two values have this name")
        names.add(name)
        try:
            values.append((name, _convert(leaf)))
        except (TypeError, OverflowError) as error:
            refused.append(f"{name!r}: {error}")
    # Also if this rank refuses values, because other ranks wait for it to gather the DTensors.
    fetched = _fetch(values)
    if refused:
        raise ValueError(
            f"step {number} cannot be logged: {some_of(refused)}. Only numbers and dense tensors "
            "of real numbers can be logged. Remove or convert the other values"
        )
    if own_rank() != 0:
        return
    if logger is not None and not isinstance(logger, (logging.Logger, logging.LoggerAdapter)):
        _log_to(logger, number, fetched)
        return
    line = _Line()
    _log_to(line, number, fetched)
    text = f"step {number}{': ' if line.parts else ''}{', '.join(line.parts)}"
    if logger is None:
        print(text, flush=True)
    else:
        logger.info("%s", text, stacklevel=2)


class _Line:
    """A SummaryLogger that collects the parts of a line of text."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.parts.append(f"{printable(tag)}={value if isinstance(value, int) else f'{value:.6g}'}")

    def add_histogram(self, tag: str, values: torch.Tensor, step: int) -> None:
        std, mean = torch.std_mean(values, correction=0)
        figures = {"mean": mean, "std": std, "min": values.min(), "max": values.max()}
        shown = [f"{name}={figure.item():.6g}" for name, figure in figures.items()]
        self.parts.append(f"{printable(tag)}={{{', '.join(shown)}, n={values.numel()}}}")


def _log_to(logger: SummaryLogger, step: int, values: dict[str, Any]) -> None:
    for name, value in values.items():
        try:
            if not isinstance(value, torch.Tensor):
                # True and False become 1 and 0.
                logger.add_scalar(name, value if isinstance(value, float) else int(value), step)
                continue
            # TensorBoard accepts neither bfloat16 nor float8.
            is_narrow = value.is_floating_point() and value.itemsize <= 4
            floats = value.flatten().to(torch.float32 if is_narrow else torch.float64)
            finite = floats[torch.isfinite(floats)]
            if finite.numel():
                logger.add_histogram(name, finite, step)
            if len(finite) < len(floats):
                logger.add_scalar(f"{name}/nonfinite", len(floats) - len(finite), step)
        except ValueError as error:
            raise ValueError(f"step {step}: the logger rejects {name!r}: {error}") from error


def _leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a tree with their names. torch's pytree knows neither dataclasses nor
    all mappings."""
    if isinstance(tree, (Mapping, type)):
        pass  # also a mapping that is a dataclass, such as a ModelOutput of transformers
    elif dataclasses.is_dataclass(tree):
        tree = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    elif isinstance(tree, (list, tuple, deque)):
        tree = dict(zip(getattr(tree, "_fields", range(len(tree))), tree, strict=True))
    if not isinstance(tree, Mapping):
        yield name or "output", tree
        return
    for key, child in tree.items():
        yield from _leaves(child, f"{name}/{key}" if name else str(key))


def _convert(leaf: Any) -> float | torch.Tensor:
    """Converts a leaf to a number or tensor.

    Raises:
        TypeError, OverflowError: the leaf cannot be logged.
    """
    if isinstance(leaf, (int, float)):
        float(leaf)
        return leaf
    kind = type(leaf).__qualname__
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(leaf, (numpy.ndarray, numpy.generic)):
        # Copy the array: torch rejects negative strides and warns about read-only arrays.
        leaf = torch.as_tensor(leaf.copy())
    if not isinstance(leaf, torch.Tensor):
        raise TypeError("None" if leaf is None else f"a {kind}")
    is_wrapper = type(leaf).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    # Other wrappers may store their values elsewhere.
    has_values = not is_wrapper or isinstance(leaf, (DTensor, AsyncCollectiveTensor))
    is_dense = has_values and leaf.layout == torch.strided and not leaf.is_nested
    if not (is_dense and leaf.device.type != "meta" and leaf.numel() and _is_real(leaf.dtype)):
        shape = "nested" if leaf.is_nested else f"shape {tuple(leaf.shape)}"
        raise TypeError(f"a {kind} of {leaf.dtype}, {leaf.layout}, {shape}, on {leaf.device}")
    if isinstance(leaf, DTensor) and not bool((leaf.device_mesh.mesh == 0).any()):
        raise TypeError(f"a DTensor on {leaf.device_mesh}, which does not include rank 0")
    return leaf


@functools.cache
def _is_real(dtype: torch.dtype) -> bool:
    if dtype.is_complex:
        return False
    try:
        torch.zeros(1, dtype=dtype).to(torch.float32)
    except (RuntimeError, TypeError):  # such as qint8, float4_e2m1fn_x2 and bits8
        return False
    return True


@torch.no_grad()
def _fetch(values: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the values as numbers and CPU tensors on rank 0. Other ranks only take part in
    gathering DTensors, and get nothing."""
    fetched: dict[str, Any] = {}
    devices: set[torch.device] = set()
    for name, value in values:
        if isinstance(value, DTensor):
            if value.device_mesh.get_coordinate() is None:
                continue
            # Gather one DTensor at a time, so that a device holds only one.
            value = value.full_tensor()
        if own_rank() != 0:
            continue
        if isinstance(value, torch.Tensor):
            devices |= {value.device} if value.is_cuda else set()
            # torch copies from CUDA to page-locked memory, which it keeps for later copies.
            value = value.to("cpu", non_blocking=value.is_cuda)
        fetched[name] = value
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return {
        name: value.item() if isinstance(value, torch.Tensor) and not value.dim() else value
        for name, value in fetched.items()
    }
