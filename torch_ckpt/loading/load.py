"""Loads a checkpoint on all ranks.

1. Each rank flattens its state dict and compares it with the checkpoint's index: names, kinds,
   shapes and dtypes. All differences are reported together, on all ranks, before anything changes.
2. Each rank allocates memory for the meta tensors to load.
3. Each rank reads the values that it needs. The engine plans them from the index. torch describes
   the parts of tensors that the engine does not know, such as ShardedTensors
   (checkpoint/flat_state.py). Ranks exchange plans only for ``read_once``.
4. Tensors are loaded in place. All other values are replaced, and ``Stateful`` values receive their
   state through ``load_state_dict``.
"""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch._utils import _get_device_module
from torch.distributed.checkpoint._traverse import set_element, traverse_state_dict_v_2_3
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor

from torch_ckpt import _C, _core
from torch_ckpt._base.checks import reusable
from torch_ckpt._base.cycle_collector import no_gc
from torch_ckpt._base.formatting import some_of
from torch_ckpt.checkpoint.chunks import chunks_here
from torch_ckpt.checkpoint.flat_state import describe_target, flatten_sharded_tensors
from torch_ckpt.checkpoint.reading import Reading
from torch_ckpt.checkpoint.source import Source
from torch_ckpt.errors import LoadMismatch
from torch_ckpt.loading.renaming import Rename, new_names, rename_in, suggested_rename
from torch_ckpt.loading.report import LoadReport, Names
from torch_ckpt.state.placeholders import (
    DEVICE,
    OptionalObject,
    Placeholder,
    Stored,
    describe_sharded,
)

StateDict = dict[str, Any]

T = TypeVar("T")

#: True if all values of a state dict must fit the checkpoint; "dtypes" if also their dtypes must.
Strict = bool | Literal["dtypes"]

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
        reading: the reads of the values that can be loaded.
        tied: number of each tensor that is missing from the checkpoint, and number of a loaded
            tensor in the same memory.
    """

    values: StateDict
    state: _C.LoadState
    report: LoadReport
    loaded_keys: Set[str]
    reading: Reading
    tied: list[tuple[int, int]]


class Load:
    """A load on this rank.

    Args:
        source: the checkpoint, which the load opens.
        rank: this rank, whose own metadata is read if there is none for all ranks.
        names: selects names of the state dict to load; None selects all.
        rename: maps the checkpoint's names to names of the state dict.
    """

    def __init__(
        self,
        source: Source,
        rank: int = 0,
        names: Names = None,
        rename: Rename = None,
    ) -> None:
        self.source = source
        self._rank = rank
        self._rename = None if rename is None else reusable(rename)
        self._chosen = None if names is None else _Chosen(names)
        #: True if all names are loaded, because the caller passed no ``names``.
        self.loads_all = names is None
        self._index: _core.CheckpointIndex | None = None
        self._renamed: Metadata | None = None
        self._old_names: dict[str, str] = {}

    @property
    def unmatched(self) -> list[str]:
        """The patterns in ``names`` that have not matched any name so far."""
        return [] if self._chosen is None else self._chosen.unmatched()

    @property
    def index(self) -> _core.CheckpointIndex:
        """The index of the checkpoint. The first access opens the checkpoint."""
        if self._index is None:
            index = self.source.open(self._rank)
            if self._rename is not None:
                new = new_names(index.names(), self._rename)
                index = index.renamed(list(new.values()))
                self._old_names = {name: old for old, name in new.items()}
            self._index = index
        return self._index

    @no_gc()
    def match(self, values: StateDict) -> Match:
        """Compares a complete or partial state dict with the checkpoint, and plans the reads of all
        values that fit. Changes no value."""
        # Decode the metadata first: its index needs less memory than the decoding.
        index = self.index
        state = _C.LoadState(values, chunks_here)
        flatten_sharded_tensors(state)
        match = self._match(values, state, index)
        if match.report.missing and match.report.unexpected:
            old = _flattened_as_2_3(values)
            if not old.keys().isdisjoint(match.report.unexpected):
                state = _C.LoadState({}, chunks_here)
                for name, (path, value) in old.items():
                    state.add(name, path, value)
                match = self._match(values, state, index)
        self._plan(match)
        self._suggest_rename(match.report)
        return match

    def require_fit(self, report: LoadReport, strict: Strict) -> None:
        """Raises LoadMismatch if the checkpoint does not fit the state dict.

        If ``strict`` is true, every value must fit. Otherwise, each top-level dict and ``Stateful``
        value must have at least one value that can be loaded, and so must the state dict.
        """
        self._suggest_rename(report)
        is_refused = bool(report.refused) or (strict and not report.fits)
        if is_refused or (strict == "dtypes" and report.dtypes):
            lines = "\n".join([*_torchs_words(report), str(report)])
            raise LoadMismatch(f"the checkpoint does not fit the state dict: {lines}", report)
        if report.absent or not (report.loaded or report.fits):
            what = some_of(report.absent) or "the state dict"
            raise LoadMismatch(
                f"no value of {what} can be loaded from the checkpoint, and strict=False must not "
                "skip a state completely; remove it from the state dict, or choose values with "
                f"names=: {report}",
                report,
            )

    def begin(self, match: Match, *, is_last: bool = False) -> Reading:
        """Allocates memory for meta tensors, zeroes the regions that are not stored, and returns
        the reads.

        Args:
            is_last: True to release the flattened state and, unless records were transformed, the
                metadata. Nothing can be matched afterwards.
        """
        on_meta = match.state.loaded_on_meta()
        for row in on_meta:
            real = _allocate(match.state.value(row))
            set_element(match.values, match.state.path(row), real)
            match.state.replace(row, real)
            for tied in (tied for tied, other in match.tied if other == row):
                set_element(match.values, match.state.path(tied), real)
        if on_meta:
            self._plan(match)
        if self.source.options.lets_sizes_differ:
            match.state.zero_unstored()
        reading = match.reading
        if is_last:
            match.state, match.reading = _C.LoadState({}, chunks_here), Reading()
            self._index = self._renamed = None
            if not (reading.transformed or reading.tensors.has_transformed):
                self.source.release_metadata()
        return reading

    def read_freeing(self, reading: Reading, let_go: Callable[[], None]) -> None:
        """Reads tensors in place. Frees each object before reading its replacement.

        Args:
            let_go: called after each removal of an object that is a top-level value of the state
                dict, so that the caller can drop its own reference to the object.
        """
        objects, reading.objects = reading.objects, []
        self.source.read(reading)
        for read in objects:
            set_element(reading.values, read.target, None)
            if len(read.target) == 1:
                let_go()
            self.source.read(Reading(values=reading.values, objects=[read]))

    # --- private ---------------------------------------------------------------------------------

    def _metadata(self) -> Metadata:
        """Returns the metadata, decoded into torch's objects."""
        if self._renamed is None:
            self._renamed = self.source.metadata()
            rename_in(self._renamed, self._rename)
        return self._renamed

    def _match(self, values: StateDict, state: _C.LoadState, index: _core.CheckpointIndex) -> Match:
        contents = Stored(
            index,
            self._metadata,
            self._read_objects,
            self._old_names,
            self.source.size_rule,
            self.loads_all,
        )
        placeholders: list[Placeholder] = []
        for row in state.others():
            value = state.value(row)
            if not isinstance(value, Placeholder):
                continue
            name, path = state.name(row), state.path(row)
            if self._chosen and isinstance(value, OptionalObject) and not self._chosen(name):
                continue
            state.remove(row)
            placeholders.append(value)
            for found, target in value.choose(contents, name).items():
                state.add(found, (*path, found), target)
        match = state.match(index, self.source.size_rule, self._chosen)
        # A number that has become a tensor since the state dict was built, such as the best loss.
        numbers = [
            row
            for row in match.kinds
            if type(state.value(row)) in _NUMBERS and contents.is_tensor(state.name(row))
        ]
        for row in numbers:
            state.replace(row, contents.meta_tensor(state.name(row), torch.device("cpu")))
        if numbers:
            match = state.match(index, self.source.size_rule, self._chosen)
        report = LoadReport(
            refused=[
                describe_sharded(state.name(row))
                for row in numbers
                if contents.is_sharded(state.name(row))
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
            stored = "an object" if index.tensor(name) is None else "a tensor"
            is_placeholder = isinstance(value, Placeholder)
            wanted = value.wanted if is_placeholder else f"a {type(value).__name__}"
            report.kinds.append((name, stored, wanted))
        loaded = set(report.loaded) if placeholders else set()
        for placeholder in placeholders:
            report.refused += placeholder.refusals(contents, self._chosen or (lambda _name: True))
            placeholder.matched(loaded)
        tied = _tied(state, report) if report.missing else []
        loaded_keys = values.keys() if self.loads_all else set(match.loaded_keys)
        if tied:
            names = dict.fromkeys(state.name(row) for row, _other in tied)
            keys = {str(state.path(row)[0]) for row, _other in tied}
            report.loaded += names
            report.missing = [name for name in report.missing if name not in names]
            report.absent = [key for key in report.absent if key not in keys]
            loaded_keys = loaded_keys | keys
        return Match(values, state, report, loaded_keys, Reading(), tied)

    def _suggest_rename(self, report: LoadReport) -> None:
        """Finds the renaming that would make all missing names fit, unless ``rename`` is set."""
        if report.missing and report.unexpected and self._rename is None:
            names = self.index.names()
            report.rename = suggested_rename(names, report.missing, report.unexpected)

    def _read_objects(self, names: Iterable[str]) -> StateDict:
        """Reads objects before the load. Leaves out objects that only torch's code can read."""
        values: StateDict = {}
        state = _C.LoadState({}, chunks_here)
        for name in names:
            state.add(name, (name,), None)
        state.match(self.index, self.source.size_rule, None)
        objects = state.plan(_C.TensorReads())
        reads = [state.object_read(row) for row in objects if not state.is_transformed(row)]
        self.source.read(Reading(values=values, objects=reads))
        return values

    def _plan(self, match: Match) -> None:
        """Plans the reads."""
        state, reading = match.state, Reading(values=match.values)
        for row in state.undescribed():
            describe_target(state, row)
        for row in state.plan(reading.tensors):
            read = state.object_read(row)
            (reading.transformed if state.is_transformed(row) else reading.objects).append(read)
        match.reading = reading


def _torchs_words(report: LoadReport) -> Iterator[str]:
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
            memory = _memory_of(state.value(row))
            if memory is not None and name in loaded:
                rows_of.setdefault(memory, row)
            elif memory is not None:
                wanted.append((row, memory))
    return [(row, rows_of[memory]) for row, memory in wanted if memory in rows_of]


def _memory_of(value: Any) -> Any:
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


def _flattened_as_2_3(values: StateDict) -> dict[str, tuple[Any, Any]]:
    """Returns the path and the value for each name that torch 2.3 or older would have used.

    Empty if two values would have the same name, because torch 2.3 refused to save them.
    """
    found: list[tuple[tuple[Any, ...], Any]] = []
    # Not flatten_state_dict: its version is a global variable, which saves in other threads use.
    traverse_state_dict_v_2_3(values, lambda path, value: found.append((path, value)))
    flat = {".".join(map(str, path)): (path, value) for path, value in found}
    return flat if len(flat) == len(found) else {}


class _Chosen:
    """Decides which names are loaded, and records the patterns that match."""

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


def _allocate(value: Any) -> Any:
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
