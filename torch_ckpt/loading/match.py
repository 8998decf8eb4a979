"""Compares a state dict with a checkpoint.

The comparison covers names, kinds, shapes and dtypes. It changes no value.
"""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._utils import _get_device_module
from torch.distributed.checkpoint._traverse import traverse_state_dict_v_2_3
from torch.distributed.tensor import DTensor

from torch_ckpt import _C
from torch_ckpt.checkpoint.flat_state import describe_target
from torch_ckpt.checkpoint.reading import Reading
from torch_ckpt.loading.report import LoadReport
from torch_ckpt.state.placeholders import (
    DEVICE,
    OptionalObject,
    Placeholder,
    Stored,
    describe_sharded,
)

StateDict = dict[str, Any]

# Types of values that a stored tensor replaces.
_NUMBERS = (bool, int, float, complex, type(None))


@dataclass
class Match:
    """A state dict that was compared with the checkpoint.

    Attributes:
        values: the state dict.
        state: the flattened state dict.
        report: the comparison.
        loaded_keys: top-level keys with at least one value to load; all keys if the caller passed
            no ``names``.
        tied: number of each tensor that is missing from the checkpoint, and number of a loaded
            tensor in the same memory.
        reading: the reads of the values that can be loaded, once they are planned.
    """

    values: StateDict
    state: _C.LoadState
    report: LoadReport
    loaded_keys: Set[str]
    tied: list[tuple[int, int]]
    reading: Reading = field(default_factory=Reading)

    def plan(self) -> None:
        """Plans the reads."""
        state, reading = self.state, Reading(values=self.values)
        for row in state.undescribed():
            describe_target(state, row)
        for row in state.plan(reading.tensors):
            read = state.object_read(row)
            (reading.transformed if state.is_transformed(row) else reading.objects).append(read)
        self.reading = reading


class Chosen:
    """Decides which names are loaded, and records the patterns that match.

    Args:
        names: patterns, or a function that returns True for each name to load.

    Raises:
        ValueError: ``names`` is a string.
    """

    def __init__(self, names: Iterable[str] | Callable[[str], bool]) -> None:
        if isinstance(names, str):
            raise ValueError(f"names must be a list of patterns, got the string {names!r}")
        self._function = names if callable(names) else None
        self._matched = {} if callable(names) else dict.fromkeys(names, False)

    def __call__(self, name: str) -> bool:
        if self._function is not None:
            return bool(self._function(name))
        matching = [p for p in self._matched if fnmatch.fnmatchcase(name, p)]
        self._matched.update(dict.fromkeys(matching, True))
        return bool(matching)

    def unmatched(self) -> list[str]:
        """Returns the patterns that have not matched any name."""
        return [pattern for pattern, is_matched in self._matched.items() if not is_matched]


def compare(values: StateDict, state: _C.LoadState, stored: Stored, chosen: Chosen | None) -> Match:
    """Compares a state dict with a checkpoint. Replaces the placeholders in the flattened state
    dict by the values that they choose.

    Args:
        state: the flattened state dict.
        stored: the contents of the checkpoint.
        chosen: decides which names are loaded; None loads all.
    """
    index = stored.index
    placeholders: list[Placeholder] = []
    for row in state.objects():
        value = state.value(row)
        if not isinstance(value, Placeholder):
            continue
        name, path = state.name(row), state.path(row)
        if chosen and isinstance(value, OptionalObject) and not chosen(name):
            continue
        state.remove(row)
        placeholders.append(value)
        for found, target in value.choose(stored, name).items():
            state.add(found, (*path, found), target)
    match = state.match(index, stored.size_rule, chosen)
    # A number that has become a tensor since the state dict was built, such as the best loss.
    numbers = [
        row
        for row in match.kinds
        if type(state.value(row)) in _NUMBERS and stored.is_tensor(state.name(row))
    ]
    for row in numbers:
        state.replace(row, stored.meta_tensor(state.name(row), torch.device("cpu")))
    if numbers:
        match = state.match(index, stored.size_rule, chosen)
    report = LoadReport(
        refused=[
            describe_sharded(state.name(row))
            for row in numbers
            if stored.is_sharded(state.name(row))
        ],
        loaded=match.loaded,
        missing=match.missing,
        unexpected=match.unexpected,
        shapes=match.shapes,
        dtypes=match.dtypes,
        grown=match.grown,
        absent=match.absent_keys,
        truncated=match.truncated,
    )
    for row in match.kinds:
        name, value = state.name(row), state.value(row)
        kind = "an object" if index.tensor(name) is None else "a tensor"
        is_placeholder = isinstance(value, Placeholder)
        wanted = value.wanted if is_placeholder else f"a {type(value).__name__}"
        report.kinds.append((name, kind, wanted))
    loaded = set(report.loaded) if placeholders else set()
    for placeholder in placeholders:
        report.refused += placeholder.refusals(stored, chosen or (lambda _name: True))
        placeholder.matched(loaded)
    tied = _tied(state, report) if report.missing else []
    loaded_keys = values.keys() if chosen is None else set(match.loaded_keys)
    if tied:
        names = dict.fromkeys(state.name(row) for row, _other in tied)
        keys = {str(state.path(row)[0]) for row, _other in tied}
        report.loaded += names
        report.missing = [name for name in report.missing if name not in names]
        report.absent = [key for key in report.absent if key not in keys]
        loaded_keys = loaded_keys | keys
    return Match(values, state, report, loaded_keys, tied)


def torchs_words(report: LoadReport) -> Iterator[str]:
    """Yields differences in the wording of torch's planner, which callers may search for."""
    for name in report.missing[:1]:
        yield f"Missing key in checkpoint state_dict: {name}."
    for name, has, wants in report.shapes[:1]:
        yield f"Size mismatch between saved {has} and current: {wants} for {name}."


def _tied(state: _C.LoadState, report: LoadReport) -> list[tuple[int, int]]:
    """Finds missing tensors that have the same memory as a loaded tensor, such as the output layer
    of a model that shares its weight with the embedding."""
    loaded, missing = set(report.loaded), set(report.missing)
    rows_of: dict[Any, int] = {}
    wanted: list[tuple[int, Any]] = []
    for row, name in enumerate(state.names()):
        if name in loaded or name in missing:
            memory = memory_of(state.value(row))
            if memory is not None and name in loaded:
                rows_of.setdefault(memory, row)
            elif memory is not None:
                wanted.append((row, memory))
    return [(row, rows_of[memory]) for row, memory in wanted if memory in rows_of]


def memory_of(value: Any) -> Any:
    """Returns a key that is equal for tensors with the same elements in memory; None for other
    values and for empty tensors."""
    local = getattr(value, "_local_tensor", value)
    if type(local) not in (torch.Tensor, torch.nn.Parameter) or local.layout != torch.strided:
        return None
    if not local.numel():
        return None
    layout = getattr(value, "_spec", None)
    storage = local.untyped_storage()._cdata
    return storage, local.storage_offset(), local.shape, local.stride(), local.dtype, layout


def flattened_as_2_3(values: StateDict) -> dict[str, tuple[Any, Any]]:
    """Returns the path and the value for each name that torch 2.3 or older would have used.

    Empty if two values would have the same name, because torch 2.3 refused to save them.
    """
    found: list[tuple[tuple[Any, ...], Any]] = []
    # Not flatten_state_dict: its version is a global variable, which saves in other threads use.
    traverse_state_dict_v_2_3(values, lambda path, value: found.append((path, value)))
    flat = {".".join(map(str, path)): (path, value) for path, value in found}
    return flat if len(flat) == len(found) else {}


def allocate(value: Any) -> Any:
    """Allocates a tensor like a meta tensor.

    The device is the one that :meth:`Stored.meta_tensor` received; otherwise the process group's
    device or, without a process group, the default device.
    """
    device: Any = getattr(value, DEVICE, None) or torch.get_default_device()
    if device.type == "meta":
        device = torch.device("cpu")
    if dist.is_initialized() and not hasattr(value, DEVICE):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch may have deprecated this private function
            kind = dist.distributed_c10d._get_pg_default_device().type
        device = _get_device_module(kind).current_device()
    if isinstance(value, DTensor):
        return DTensor.from_local(
            torch.empty_like(value.to_local(), device=device),
            device_mesh=value.device_mesh,
            placements=value.placements,
            shape=value.size(),
            stride=value.stride(),
        )
    real = torch.empty_like(value, device=device)
    # torch 2.15 marks a tensor as a shard with these attributes.
    for name in ("global_shape", "global_offsets", "local_offsets", "local_sizes"):
        if hasattr(value, name):
            setattr(real, name, getattr(value, name))
    return real
