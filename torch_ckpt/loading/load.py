"""Loads a checkpoint on all ranks.

1. Each rank flattens its state dict and compares it with the checkpoint's index: names, kinds,
   shapes and dtypes. All differences are reported together, on all ranks, before anything changes.
2. Each rank allocates memory for the meta tensors to load.
3. Each rank reads the values that it needs. The engine plans plain tensors and DTensors from the
   index. torch's planner plans all other tensors, such as ShardedTensors; only then is the metadata
   decoded into torch's objects. Ranks exchange plans only for ``read_once``.
4. Tensors are loaded in place. All other values are replaced, and ``Stateful`` values receive their
   state through ``load_state_dict``.
"""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch._utils import _get_device_module
from torch.distributed.checkpoint._traverse import set_element, traverse_state_dict_v_2_3
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.tensor import DTensor

from torch_ckpt import _C, _core
from torch_ckpt._base.cycle_collector import no_gc
from torch_ckpt._base.formatting import some_of
from torch_ckpt._base.options import reusable
from torch_ckpt.checkpoint.chunks import chunks_here, require_consecutive, require_cover
from torch_ckpt.checkpoint.flat_state import flat_state
from torch_ckpt.errors import LoadMismatch
from torch_ckpt.loading.reader import FileSystemReader
from torch_ckpt.loading.reading import Reading
from torch_ckpt.loading.renaming import Rename, new_names, rename_in
from torch_ckpt.loading.report import LoadReport, Names
from torch_ckpt.loading.zero_fill import SIZES, zero_what_is_not_stored
from torch_ckpt.ranks.exchange import Exchange

StateDict = dict[str, Any]

T = TypeVar("T")

#: True if all values of a state dict must fit the checkpoint; "dtypes" if also their dtypes must.
Strict = bool | Literal["dtypes"]


class IfStored:
    """A placeholder in a state dict for an optional object.

    A load replaces the placeholder with the object if the checkpoint has it.

    Attributes:
        missing: True after a load from a checkpoint that lacks the object.
    """

    def __init__(self) -> None:
        self.missing = False


class Stored:
    """Names and types of the values in a checkpoint, for callers that choose what to load."""

    def __init__(self, index: _core.CheckpointIndex, whole: Callable[[], Metadata]) -> None:
        self._index = index
        self._whole = whole
        #: Fully qualified names, in the order of the metadata.
        self.names: list[str] = index.names()

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def is_tensor(self, name: str) -> bool:
        """Returns True if the checkpoint has a tensor with this name."""
        return self._index.tensor(name) is not None

    def meta_tensor(self, name: str) -> torch.Tensor:
        """Returns a meta tensor with the shape and dtype of the stored tensor."""
        found = self._index.tensor(name)
        assert found is not None
        return torch.empty(found[1], dtype=getattr(torch, found[0]), device="meta")

    def paths(self) -> Mapping[str, Any]:
        """Returns each value's path in the nested state dict, by name. Empty if the planner that
        saved the checkpoint stored no paths."""
        paths = self._whole().planner_data
        return paths if isinstance(paths, dict) else {}


class Discovered:
    """A placeholder in a state dict for values whose names are unknown until the metadata is read.

    Attributes:
        values: the loaded values, by fully qualified name.
    """

    def __init__(self) -> None:
        self.values: StateDict = {}

    def choose(self, stored: Stored) -> StateDict:
        """Chooses the values to load in place of this placeholder.

        Returns:
            A meta tensor for each tensor, and any other value for each object, by fully qualified
            name. Names that the checkpoint lacks are reported as missing.
        """
        raise NotImplementedError

    def __setitem__(self, name: str, value: Any) -> None:
        # torch's set_element calls this.
        self.values[name] = value


class _Planner(DefaultLoadPlanner):
    """torch's planner for the values of a state dict that the engine does not plan."""

    def set_up_empty(self, values: StateDict) -> None:
        """Replaces set_up_planner, but leaves the plan empty and allocates nothing."""
        self.original_state_dict = values
        self.state_dict: StateDict = {}
        self.mappings: dict[str, Any] = {}

    def plan_part(self, part: StateDict, metadata: Metadata) -> LoadPlan:
        """Plans the reads of some tensors. ``metadata`` must describe all of them."""
        self.metadata = metadata
        before = self.state_dict, self.flatten_state_dict
        # The state dict is already flat. With flatten_state_dict=True, torch would report all other
        # names as missing, and assume that torch 2.3 wrote the checkpoint.
        self.state_dict, self.flatten_state_dict = part, False
        try:
            return self.create_local_plan()
        finally:
            self.state_dict, self.flatten_state_dict = before


@dataclass
class Prepared:
    """A state dict that is ready to be loaded.

    Attributes:
        report: the comparison of the state dict with the checkpoint.
        reading: the reads to perform.
        values: the state dict.
        flat: the flattened state dict.
        match: the flattened values, each matched with its stored value.
        keys: top-level keys with at least one value to load.
    """

    report: LoadReport
    reading: Reading
    values: StateDict
    flat: _C.FlatState
    match: _C.LoadMatch
    keys: set[Any]

    def loaded(self) -> StateDict:
        """Returns the tensors and objects to load, by fully qualified name."""
        rows = self.match.rows_with("loaded")
        return {self.flat.name(row): self.flat.value(row) for row in rows}


class Load:
    """A load on this rank.

    Args:
        reader: the reader. It is set up for the checkpoint unless ``opened`` is given.
        names: selects names of the state dict to load; None selects all.
        rename: maps the checkpoint's names to names of the state dict.
        opened: the metadata and the index with which the reader has already been set up.
    """

    def __init__(
        self,
        reader: FileSystemReader,
        ranks: Exchange,
        names: Names = None,
        rename: Rename = None,
        opened: tuple[Metadata, _core.CheckpointIndex] | None = None,
    ) -> None:
        self.reader = reader
        self._ranks = ranks
        self._rename = reusable(rename)
        self._chosen = _Chosen(names)
        self._opened = opened
        self._is_renamed = False

    @no_gc()
    def compare(self, values: StateDict) -> LoadReport:
        """Compares a complete or partial state dict with the checkpoint."""
        return self._matched(values)[2]

    @property
    def unmatched(self) -> list[str]:
        """The patterns in ``names`` that have not matched any name so far."""
        return self._chosen.unmatched

    @property
    def loads_all(self) -> bool:
        """True if all names are loaded, because the caller passed no ``names``."""
        return self._chosen.all

    def has(self, name: str) -> bool:
        """Returns True if the checkpoint has a value with this fully qualified name."""
        return name in self._index()

    def loads_key(self, key: str, prepared: Prepared) -> bool:
        """Returns True if any part of the value of a top-level key is to be loaded."""
        return self._chosen.all or key in prepared.keys

    @no_gc()
    def prepare(self, values: StateDict) -> Prepared:
        """Plans the reads of all values that fit, without changing any value."""
        flat, match, report = self._matched(values)
        keys = set(match.keys())
        return Prepared(report, self._reading(values, flat, match), values, flat, match, keys)

    def materialize(self, prepared: Prepared) -> Prepared:
        """Replaces the meta tensors to load with tensors that have memory."""
        flat = prepared.flat
        loaded = set(prepared.match.rows_with("loaded"))
        rows = [row for row in (*flat.on_meta(), *flat.others()) if _is_meta(flat.value(row))]
        rows = [row for row in rows if row in loaded]
        if not rows:
            return prepared
        for row in rows:
            real = _real(flat.value(row))
            set_element(prepared.values, flat.path(row), real)
            flat.replace(row, real)
        prepared.reading = self._reading(prepared.values, flat, prepared.match)
        return prepared

    def require_fit(self, report: LoadReport, strict: Strict) -> None:
        """Raises LoadMismatch if the checkpoint does not fit the state dict.

        If ``strict`` is true, every value must fit. Otherwise, each top-level dict and ``Stateful``
        value must have at least one value that can be loaded, and so must the state dict.
        """
        if (strict and not report.fits) or (strict == "dtypes" and report.dtypes):
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

    def begin(self, prepared: Prepared) -> Reading:
        """Allocates memory for meta tensors, zeroes the regions that are not stored, and returns
        the reads."""
        prepared = self.materialize(prepared)
        if self.reader.zero_fill:
            zero_what_is_not_stored(prepared.loaded(), self._whole())
        if self.reader.read_once:
            # Ranks identify reads that they share by location, which the rows have.
            self._whole()
            prepared.reading.expand()
        return prepared.reading

    def read_freeing(self, reading: Reading, let_go: Callable[[], None]) -> None:
        """Reads tensors in place. Frees each object before reading its replacement.

        Args:
            let_go: called after each removal of an object that is a top-level value of the state
                dict, so that the caller can drop its own reference to the object.
        """
        planner = reading.planner
        assert isinstance(planner, _Planner)
        objects, reading.byte_items = reading.byte_items, []
        self.reader.read(reading)
        # The match refers to all values and would keep the objects alive.
        reading.match = None
        for entry in objects:
            name = entry[0].dest_index.fqn
            path = planner.mappings[name]
            set_element(planner.original_state_dict, path, None)
            planner.state_dict[name] = None
            if len(path) == 1:
                let_go()
            alone = Reading(planner)
            alone.byte_items.append(entry)
            self.reader.read(alone)

    # --- private ---------------------------------------------------------------------------------

    def _index(self) -> _core.CheckpointIndex:
        if self._opened is None:
            metadata, index = _read_index(self.reader, self._ranks.rank)
            if self._rename is not None:
                index.rename(list(new_names(index.names(), self._rename).values()))
            self._opened = metadata, index
            self.reader.set_up_for_load(self._ranks.rank, metadata, index)
        return self._opened[1]

    def _whole(self) -> Metadata:
        """Returns the metadata, decoded into torch's objects."""
        self._index()
        assert self._opened is not None
        metadata = self._opened[0]
        if not self._is_renamed:
            rename_in(metadata, self._rename)
            self._is_renamed = True
        return metadata

    def _matched(self, values: StateDict) -> tuple[_C.FlatState, _C.LoadMatch, LoadReport]:
        flat = flat_state(values)
        self._discover(flat)
        match, report = self._compare(flat)
        if report.missing and report.unexpected:
            old = _flattened_as_2_3(values)
            if not old.keys().isdisjoint(report.unexpected):
                flat = _C.FlatState({}, chunks_here)
                for name, (path, value) in old.items():
                    flat.add(name, path, value)
                match, report = self._compare(flat)
        return flat, match, report

    def _discover(self, flat: _C.FlatState) -> None:
        """Replaces each ``Discovered`` placeholder with the values that it chooses."""
        for row in flat.others():
            value = flat.value(row)
            if isinstance(value, Discovered):
                path = flat.path(row)
                flat.remove(row)
                for found, target in value.choose(Stored(self._index(), self._whole)).items():
                    flat.add(found, (*path, found), target)

    def _compare(self, flat: _C.FlatState) -> tuple[_C.LoadMatch, LoadReport]:
        index = self._index()
        chosen = [] if self._chosen.all else [self._chosen(name) for name in flat.names()]
        match = _C.LoadMatch(flat, index, self.reader.size_rule, chosen)
        report = LoadReport()
        for row in match.pending():
            name, value = flat.name(row), flat.value(row)
            stored = index.tensor(name)
            if name not in index:
                if isinstance(value, IfStored):
                    value.missing = True
                status = "skipped" if isinstance(value, IfStored) else "missing"
            elif stored is not None:
                status = self._compare_tensor(name, value, stored, report)
            else:
                # An object may replace a zero-dimensional tensor.
                status = "kind" if _size_of(value) else "loaded"
            match.set_status(row, status)
        for name, has, wants in match.other_sizes("shape"):
            report.shapes.append((name, torch.Size(has), torch.Size(wants)))
        for name, has, wants in match.other_sizes("loaded"):
            _note_sizes(name, torch.Size(has), torch.Size(wants), report)
        report.dtypes += match.other_dtypes()
        for row in match.rows_with("kind"):
            name, kind = flat.name(row), f"a {type(flat.value(row)).__name__}"
            if index.tensor(name) is None:
                report.kinds.append((name, "an object", kind))
            else:
                is_to_come = isinstance(flat.value(row), Discovered)
                report.kinds.append((name, "a tensor", "an object" if is_to_come else kind))
        report.loaded = match.names_with("loaded")
        report.missing = match.names_with("missing")
        report.absent = match.absent()
        report.unexpected = match.unexpected()
        return match, report

    def _compare_tensor(
        self, name: str, value: Any, stored: tuple[str, tuple[int, ...]], report: LoadReport
    ) -> str:
        size = _size_of(value)
        if size is None:
            return "kind"
        stored_dtype, has = getattr(torch, stored[0]), torch.Size(stored[1])
        dtype = getattr(value, "dtype", stored_dtype)
        if dtype != stored_dtype:
            report.dtypes.append((name, stored_dtype, dtype))
        if SIZES[self.reader.size_rule](has) != size:
            report.shapes.append((name, has, size))
            return "shape"
        require_consecutive(name, value)
        _note_sizes(name, has, size, report)
        return "loaded"

    def _reading(self, values: StateDict, flat: _C.FlatState, match: _C.LoadMatch) -> Reading:
        index = self._index()
        planner = _Planner(allow_partial_load=True)
        planner.set_up_empty(values)
        reading = Reading(planner)
        left = match.plan()
        reading.match = match
        tensors: StateDict = {}
        objects: list[ReadItem] = []
        for row in left:
            name = flat.name(row)
            planner.state_dict[name], planner.mappings[name] = flat.value(row), flat.path(row)
            if index.tensor(name) is not None:
                tensors[name] = flat.value(row)
                continue
            ((_offsets, _sizes, file, offset, length, is_transformed),) = index.shards(name)
            item = object_item(name)
            if file is None or is_transformed:
                objects.append(item)
            else:
                reading.byte_items.append((item, _StorageInfo(file, offset, length)))
        if tensors or objects:
            metadata = self._whole()
            items = planner.plan_part(tensors, metadata).items
            require_cover(metadata, tensors, items)
            reading.add(self.reader.reading(planner, [*items, *objects]))
        return reading


def object_item(name: str) -> ReadItem:
    """Returns the read item for an object, as torch's planner creates it."""
    index, nothing = MetadataIndex(name), torch.Size((0,))
    return ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)


def _torchs_words(report: LoadReport) -> Iterator[str]:
    """Yields differences in the wording of torch's planner, which callers may search for."""
    for name in report.missing[:1]:
        yield f"Missing key in checkpoint state_dict: {name}."
    for name, has, wants in report.shapes[:1]:
        yield f"Size mismatch between saved {has} and current: {wants} for {name}."


def _note_sizes(name: str, has: torch.Size, wants: torch.Size, report: LoadReport) -> None:
    if any(a < b for a, b in zip(has, wants, strict=True)):
        report.grown.append((name, has, wants))
    if any(a > b for a, b in zip(has, wants, strict=True)):
        report.truncated.append((name, has, wants))


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

    def __init__(self, names: Names) -> None:
        if isinstance(names, str):
            raise ValueError(f"names must be a list of patterns, got the string {names!r}")
        self._patterns = None if names is None or callable(names) else list(names)
        self._matched: set[str] = set()
        self.all = names is None
        self._function = names if callable(names) else None

    def __call__(self, name: str) -> bool:
        if self._function is not None:
            return bool(self._function(name))
        if self._patterns is None:
            return True
        matching = [p for p in self._patterns if fnmatch.fnmatchcase(name, p)]
        self._matched.update(matching)
        return bool(matching)

    @property
    def unmatched(self) -> list[str]:
        """The patterns that have not matched any name."""
        return [p for p in self._patterns or () if p not in self._matched]


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


def _real(value: Any) -> Any:
    """Allocates a tensor like a meta tensor, on the process group's device or, without a process
    group, on the default device."""
    device: Any = torch.get_default_device()
    if device.type == "meta":
        device = torch.device("cpu")
    if dist.is_initialized():
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


def _size_of(value: Any) -> torch.Size | None:
    """Returns the size of a tensor or a tensor-like object, and None for other values."""
    if hasattr(value, "global_shape"):
        return torch.Size(value.global_shape)
    size = getattr(value, "size", None)
    found = size() if callable(size) and hasattr(value, "dtype") else None
    # A storage also has size() and dtype, but its size is a number.
    return torch.Size(found) if isinstance(found, tuple) else None


def _read_index(reader: FileSystemReader, rank: int) -> tuple[Metadata, _core.CheckpointIndex]:
    """Reads the metadata. If there is none for all ranks, because they saved without collectives,
    reads this rank's own metadata."""
    try:
        return reader.read_index()
    except FileNotFoundError:
        try:
            return reader.read_index(rank=rank)
        except FileNotFoundError:
            pass
        raise
