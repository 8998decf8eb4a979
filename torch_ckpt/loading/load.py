"""A load, by all ranks.

1. Every rank flattens its state dict and compares it with the checkpoint's index: names, kinds,
   shapes and dtypes. What does not fit is reported as a whole, on all ranks, before anything has
   been changed.
2. Meta tensors that are loaded get memory.
3. Every rank reads its part. The engine plans plain tensors and DTensors, on the index; torch's
   planner the rest of the tensors (ShardedTensor and others), and what the index does not have all
   of. For these the metadata becomes torch's objects. No plans are exchanged, but for
   ``read_once``.
4. Tensors have received their values in place; other values are replaced, and ``Stateful`` ones get
   theirs by ``load_state_dict``.
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
from torch_ckpt.ranks.meeting import Ranks

StateDict = dict[str, Any]

T = TypeVar("T")

#: Whether all of a state dict must fit; "dtypes": its dtypes too.
Strict = bool | Literal["dtypes"]


class IfStored:
    """Stands in a state dict to load for an object that the checkpoint need not have.

    It is replaced where the checkpoint has one, and stays where it has not.

    Attributes:
        missing: a load has looked for it, and the checkpoint has none.
    """

    def __init__(self) -> None:
        self.missing = False


class Stored:
    """What a checkpoint has, for who must choose among it."""

    def __init__(self, index: _core.CheckpointIndex, whole: Callable[[], Metadata]) -> None:
        self._index = index
        self._whole = whole
        #: Fully qualified names, in the checkpoint's order.
        self.names: list[str] = index.names()

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def is_tensor(self, name: str) -> bool:
        """Whether it has a tensor of this name."""
        return self._index.tensor(name) is not None

    def meta_tensor(self, name: str) -> torch.Tensor:
        """One without memory, as the stored one of this name."""
        found = self._index.tensor(name)
        assert found is not None
        return torch.empty(found[1], dtype=getattr(torch, found[0]), device="meta")

    def paths(self) -> Mapping[str, Any]:
        """Where each value lay in the nested state dict, if its planner has told."""
        paths = self._whole().planner_data
        return paths if isinstance(paths, dict) else {}


class Discovered:
    """Stands in a state dict to load for what is known by name only once the metadata is read.

    Attributes:
        values: what has been loaded in its place, by fully qualified name.
    """

    def __init__(self) -> None:
        self.values: StateDict = {}

    def choose(self, stored: Stored) -> StateDict:
        """What to load in its place, by fully qualified name: meta tensors, and anything else for
        objects. Names that the checkpoint does not have are reported as missing."""
        raise NotImplementedError

    def __setitem__(self, name: str, value: Any) -> None:
        # As torch's set_element does it.
        self.values[name] = value


class _Planner(DefaultLoadPlanner):
    """torch's planner over those values of a state dict that the engine does not plan."""

    def look_at(self, values: StateDict) -> None:
        """As set_up_planner, of no value yet; nothing gets memory."""
        self.original_state_dict = values
        self.state_dict: StateDict = {}
        self.mappings: dict[str, Any] = {}

    def plan_part(self, part: StateDict, metadata: Metadata) -> LoadPlan:
        """The plan of some tensors, which ``metadata`` has."""
        self.metadata = metadata
        before = self.state_dict, self.flatten_state_dict
        # Flattening has been done. Left on, torch would take the names that are not in this part
        # for missing, and the checkpoint for one of torch 2.3.
        self.state_dict, self.flatten_state_dict = part, False
        try:
            return self.create_local_plan()
        finally:
            self.state_dict, self.flatten_state_dict = before


@dataclass
class Prepared:
    """What of a state dict is loaded.

    Attributes:
        report: how it compares with the checkpoint.
        reading: what is to be read.
        values: the state dict.
        flat: its values, as rows.
        match: these beside the checkpoint.
        keys: of the values at the top of which something is loaded.
    """

    report: LoadReport
    reading: Reading
    values: StateDict
    flat: _C.FlatState
    match: _C.LoadMatch
    keys: set[Any]

    def loaded(self) -> StateDict:
        """The tensors and objects that are loaded, by fully qualified name."""
        rows = self.match.rows_with("loaded")
        return {self.flat.name(row): self.flat.value(row) for row in rows}


class Load:
    """A load on this rank.

    Args:
        reader: set up for the checkpoint by this class.
        names: which of the state dict's names to load; None: all.
        rename: gives what the checkpoint has the names of the state dict.
        opened: what the reader has read, where it has been set up with it.
    """

    def __init__(
        self,
        reader: FileSystemReader,
        ranks: Ranks,
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
        """Compares a state dict, or a part of it, with the checkpoint."""
        return self._matched(values)[2]

    @property
    def unmatched(self) -> list[str]:
        """The patterns among ``names`` that have matched nothing so far."""
        return self._chosen.unmatched

    @property
    def takes_all(self) -> bool:
        """True if no ``names`` choose among the names of the state dict."""
        return self._chosen.all

    def has(self, name: str) -> bool:
        """True if the checkpoint has something of a fully qualified name."""
        return name in self._index()

    def takes(self, key: str, prepared: Prepared) -> bool:
        """Whether a value at the top is loaded; without ``names`` all are."""
        return self._chosen.all or key in prepared.keys

    @no_gc()
    def prepare(self, values: StateDict) -> Prepared:
        """What is to be read for what fits. Changes nothing."""
        flat, match, report = self._matched(values)
        keys = set(match.keys())
        return Prepared(report, self._reading(values, flat, match), values, flat, match, keys)

    def made_real(self, prepared: Prepared) -> Prepared:
        """With tensors that have memory instead of the meta tensors that are loaded."""
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
        """Raises LoadMismatch where not all fits; without ``strict`` where nothing of a state does.

        A state is a dict, or a ``Stateful`` value, at the top; and the whole.
        """
        if (strict and not report.fits) or (strict == "dtypes" and report.dtypes):
            lines = "\n".join([*_torchs_words(report), str(report)])
            raise LoadMismatch(f"the checkpoint does not fit the state dict: {lines}", report)
        if report.absent or not (report.loaded or report.fits):
            what = some_of(report.absent) or "the state dict"
            raise LoadMismatch(
                f"nothing of {what} is in the checkpoint and fits, and strict=False does not skip "
                f"a state as a whole; leave it out, or choose with names=: {report}",
                report,
            )

    def begun(self, prepared: Prepared) -> Reading:
        """The reading, with memory for all of it, and zeros where nothing is stored."""
        prepared = self.made_real(prepared)
        if self.reader.zero_fill:
            zero_what_is_not_stored(prepared.loaded(), self._whole())
        if self.reader.read_once:
            # Which it reads with others, by their places.
            self._whole()
            prepared.reading.expand()
        return prepared.reading

    def read_freeing(self, reading: Reading, let_go: Callable[[], None]) -> None:
        """Read tensors in place; delete each object before its replacement is read.

        Args:
            let_go: called where an object is a value of the state dict itself.
        """
        planner = reading.planner
        assert isinstance(planner, _Planner)
        objects, reading.byte_items = reading.byte_items, []
        self.reader.read(reading)
        # It holds all values.
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
        """The metadata as torch's objects, for what torch does."""
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
        """Exchanges what stands for names that only the metadata tells."""
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
                # Of a tensor without dimensions an object takes the place.
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
        planner.look_at(values)
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
    """What torch's plans have of an object."""
    index, nothing = MetadataIndex(name), torch.Size((0,))
    return ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)


def _torchs_words(report: LoadReport) -> Iterator[str]:
    """Say what does not fit as torch's planner does, for callers that look for its words."""
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
    """Map the names that torch up to 2.3 gave values to their paths and the values.

    Returns:
        Nothing if two values would have the same name: torch 2.3 refused to save them.
    """
    found: list[tuple[tuple[Any, ...], Any]] = []
    # Not flatten_state_dict, whose version is a global of torch that other threads' saves obey.
    traverse_state_dict_v_2_3(values, lambda path, value: found.append((path, value)))
    flat = {".".join(map(str, path)): (path, value) for path, value in found}
    return flat if len(flat) == len(found) else {}


class _Chosen:
    """Which names are loaded."""

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
        """The patterns that no name has matched."""
        return [p for p in self._patterns or () if p not in self._matched]


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


def _real(value: Any) -> Any:
    """Make a tensor like a meta tensor on the process group's device, or else the default one."""
    device: Any = torch.get_default_device()
    if device.type == "meta":
        device = torch.device("cpu")
    if dist.is_initialized():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own way, deprecated or not
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
    # That it is a shard of a tensor (torch 2.15) is told by attributes.
    for name in ("global_shape", "global_offsets", "local_offsets", "local_sizes"):
        if hasattr(value, name):
            setattr(real, name, getattr(value, name))
    return real


def _size_of(value: Any) -> torch.Size | None:
    """That of a tensor or what poses as one; None of other things."""
    if hasattr(value, "global_shape"):
        return torch.Size(value.global_shape)
    size = getattr(value, "size", None)
    found = size() if callable(size) and hasattr(value, "dtype") else None
    # A storage has both, too, and its size is a number.
    return torch.Size(found) if isinstance(found, tuple) else None


def _read_index(reader: FileSystemReader, rank: int) -> tuple[Metadata, _core.CheckpointIndex]:
    """Those of all ranks, or this rank's own where ranks saved without collectives."""
    try:
        return reader.read_index()
    except FileNotFoundError:
        try:
            return reader.read_index(rank=rank)
        except FileNotFoundError:
            pass
        raise
