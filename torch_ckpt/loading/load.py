"""A load, by all ranks.

1. Every rank flattens its state dict and compares it with the metadata: names, kinds, shapes and
   dtypes. What does not fit is reported as a whole, on all ranks, before anything has been changed.
2. Meta tensors that are loaded get memory.
3. Every rank reads its part: rows of its own for plain tensors, a plan of torch's planner for the
   rest (DTensor, ShardedTensor, objects). No plans are exchanged, but for ``read_once``.
4. Tensors have received their values in place; other values are replaced, and ``Stateful`` ones get
   theirs by ``load_state_dict``.
"""

from __future__ import annotations

import abc
import fnmatch
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch._utils import _get_device_module
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.tensor import DTensor

from torch_ckpt._base.cycle_collector import no_gc
from torch_ckpt._base.formatting import some_of
from torch_ckpt.checkpoint.coverage import require_all, require_cover
from torch_ckpt.errors import LoadMismatch
from torch_ckpt.loading.reader import FileSystemReader
from torch_ckpt.loading.reading import Reading
from torch_ckpt.loading.renaming import Rename, rename_in
from torch_ckpt.loading.report import LoadReport, Names
from torch_ckpt.loading.zero_fill import zero_what_is_not_stored
from torch_ckpt.ranks.meeting import Ranks

StateDict = dict[str, Any]

T = TypeVar("T")

#: Whether all of a state dict must fit; "dtypes": its dtypes too.
Strict = bool | Literal["dtypes"]

# A load that frees tensors first does so for about as many bytes at once.
_FREED_AT_ONCE = 256 << 20


class IfStored:
    """Stands in a state dict to load for an object that the checkpoint need not have.

    It is replaced where the checkpoint has one, and stays where it has not.

    Attributes:
        missing: a load has looked for it, and the checkpoint has none.
    """

    def __init__(self) -> None:
        self.missing = False


class Discovered(abc.ABC):
    """Stands in a state dict to load for what is known by name only once the metadata is read.

    Attributes:
        values: what has been loaded in its place, by fully qualified name.
    """

    def __init__(self) -> None:
        self.values: StateDict = {}

    @abc.abstractmethod
    def choose(self, metadata: Metadata) -> StateDict:
        """What to load in its place, by fully qualified name: meta tensors, and anything else for
        objects. Names that the checkpoint does not have are reported as missing."""

    def __setitem__(self, name: str, value: Any) -> None:
        # As torch's set_element does it.
        self.values[name] = value


class _Planner(DefaultLoadPlanner):
    """torch's planner over a part of the state dict."""

    def look_at(self, values: StateDict, metadata: Metadata) -> None:
        """As set_up_planner, which gives memory to all meta tensors, loaded or not."""
        self.original_state_dict, self.metadata = values, metadata
        self.state_dict, self.mappings = flatten_state_dict(_flatten_sharded_tensors(values))

    def make_real(self, names: Iterable[str]) -> None:
        """Puts tensors with memory instead of meta tensors, in the caller's dicts too."""
        for name in names:
            self.state_dict[name] = _real(self.state_dict[name])
            set_element(self.original_state_dict, self.mappings[name], self.state_dict[name])

    def discover(self) -> None:
        """Exchanges what stands for names that only the metadata tells."""
        assert self.metadata is not None
        for name, value in list(self.state_dict.items()):
            if isinstance(value, Discovered):
                del self.state_dict[name]
                path = self.mappings.pop(name)
                for found, target in value.choose(self.metadata).items():
                    self.state_dict[found] = target
                    self.mappings[found] = (*path, found)

    def plan_part(self, part: StateDict) -> LoadPlan:
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
        chosen: the flat tensors and objects that it goes to.
        keys: of the values at the top which those belong to.
    """

    report: LoadReport
    reading: Reading
    chosen: StateDict
    keys: set[Any]


class Load:
    """A load on this rank.

    Args:
        reader: set up for the checkpoint by this class.
        names: which of the state dict's names to load; None: all.
        rename: gives what the checkpoint has the names of the state dict.
    """

    def __init__(
        self, reader: FileSystemReader, ranks: Ranks, names: Names, rename: Rename = None
    ) -> None:
        self.reader = reader
        self._ranks = ranks
        self._rename = rename
        self._chosen = _Chosen(names)
        self._metadata: Metadata | None = None

    def compare(self, values: StateDict) -> LoadReport:
        """Compares a state dict, or a part of it, with the checkpoint."""
        return self._compare(self._planner(values))

    @property
    def unmatched(self) -> list[str]:
        """The patterns among ``names`` that have matched nothing so far."""
        return self._chosen.unmatched

    def takes(self, key: str, prepared: Prepared) -> bool:
        """Whether a value at the top is loaded; without ``names`` all are."""
        return self._chosen.all or key in prepared.keys

    def prepare(self, values: StateDict) -> Prepared:
        """What is to be read for what fits. Changes nothing."""
        planner = self._planner(values)
        report = self._compare(planner)
        return self._prepared(planner, report)

    def made_real(self, prepared: Prepared) -> Prepared:
        """With tensors that have memory instead of the meta tensors that are loaded."""
        meta = [name for name, value in prepared.chosen.items() if _is_meta(value)]
        if not meta:
            return prepared
        planner = prepared.reading.planner
        assert isinstance(planner, _Planner)
        planner.make_real(meta)
        return self._prepared(planner, prepared.report)

    def require_fit(self, report: LoadReport, strict: Strict) -> None:
        """Raises LoadMismatch where not all fits; without ``strict`` where nothing of a state does.

        A state is a dict, or a ``Stateful`` value, at the top; and the whole.
        """
        if (strict and not report.fits) or (strict == "dtypes" and report.dtypes):
            raise LoadMismatch(f"the checkpoint does not fit the state dict: {report}", report)
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
            assert self._metadata is not None
            zero_what_is_not_stored(prepared.chosen, self._metadata)
        return prepared.reading

    def read_freeing(self, reading: Reading, let_go: Callable[[], None]) -> None:
        """Reads it, letting go of what is there before its replacement is read.

        Args:
            let_go: called where an object is a value of the state dict itself.
        """
        planner = reading.planner
        assert isinstance(planner, _Planner)
        for entry in reading.byte_items:
            name = entry[0].dest_index.fqn
            path = planner.mappings[name]
            set_element(planner.original_state_dict, path, None)
            planner.state_dict[name] = None
            if len(path) == 1:
                let_go()
            alone = Reading(planner)
            alone.byte_items.append(entry)
            self.reader.read(alone)
        transformed = Reading(planner)
        transformed.transformed.extend(reading.transformed)
        self.reader.read(transformed)
        free = _Freeing([row[8] for row in reading.rows])
        begin = held = 0
        for end, row in enumerate(reading.rows, 1):
            held += row[8].nbytes
            if held < _FREED_AT_ONCE and end < len(reading.rows):
                continue
            wave = reading.rows[begin:end]
            for of_wave in wave:
                free(of_wave[8])
            self.reader.read_rows(list(reading.files), wave)
            begin, held = end, 0

    # --- private ---------------------------------------------------------------------------------

    def _prepared(self, planner: _Planner, report: LoadReport) -> Prepared:
        assert self._metadata is not None
        reading = Reading(planner)
        rest: StateDict = {}
        chosen = {name: planner.state_dict[name] for name in report.loaded}
        with no_gc():
            for name, target in chosen.items():
                if not self._add_plain(name, target, reading):
                    rest[name] = target
            if rest:
                items = planner.plan_part(rest).items
                require_cover(self._metadata, rest, items)
                reading.add(self.reader.reading(planner, items))
        keys = {planner.mappings[name][0] for name in chosen}
        return Prepared(report, reading, chosen, keys)

    def _planner(self, values: StateDict) -> _Planner:
        if self._metadata is None:
            metadata = _read_metadata(self.reader, self._ranks.rank)
            rename_in(metadata, self._rename)
            self._metadata = metadata
            self.reader.set_up_for_load(self._metadata, self._ranks.rank)
        planner = _Planner(allow_partial_load=True)
        planner.look_at(values, self._metadata)
        planner.discover()
        known = self._metadata.state_dict_metadata
        if any(name not in known for name in planner.state_dict):
            # It exchanges the names for those of torch 2.3, where the checkpoint has these.
            with suppress(ValueError):
                planner.create_local_plan()
        return planner

    def _compare(self, planner: _Planner) -> LoadReport:
        assert self._metadata is not None
        known = self._metadata.state_dict_metadata
        report = LoadReport()
        found: dict[Any, bool] = {}
        for name, value in planner.state_dict.items():
            if not self._chosen(name):
                continue
            fitting = len(report.loaded)
            stored = known.get(name)
            if stored is None:
                if isinstance(value, IfStored):
                    value.missing = True
                    continue
                report.missing.append(name)
            elif isinstance(stored, TensorStorageMetadata):
                self._compare_tensor(name, value, stored, report)
            elif _size_of(value):
                # Of a tensor without dimensions an object takes the place: a counter may be either.
                report.kinds.append((name, "an object", f"a {type(value).__name__}"))
            else:
                report.loaded.append(name)
            path = planner.mappings.get(name, ())
            # Not a value at the top, by whichever name; nor what None stands for, which each rank
            # has for itself.
            if path and name != path[0] and value is not None:
                found[path[0]] = found.get(path[0], False) or len(report.loaded) > fitting
        report.absent = [str(key) for key, is_found in found.items() if not is_found]
        report.unexpected = [name for name in known if name not in planner.state_dict]
        return report

    def _compare_tensor(
        self, name: str, value: Any, stored: TensorStorageMetadata, report: LoadReport
    ) -> None:
        size = _size_of(value)
        if size is None:
            wanted = "an object" if isinstance(value, Discovered) else f"a {type(value).__name__}"
            report.kinds.append((name, "a tensor", wanted))
            return
        dtype = getattr(value, "dtype", stored.properties.dtype)
        if dtype != stored.properties.dtype:
            report.dtypes.append((name, stored.properties.dtype, dtype))
        has = torch.Size(stored.size)
        # Those of loading/zero_fill.py are equal to others that they go with.
        fits = stored.size == size
        if not fits:
            report.shapes.append((name, has, size))
        else:
            if any(a < b for a, b in zip(has, size, strict=True)):
                report.grown.append((name, has, size))
            if any(a > b for a, b in zip(has, size, strict=True)):
                report.truncated.append((name, has, size))
        if fits:
            report.loaded.append(name)

    def _add_plain(self, name: str, target: Any, reading: Reading) -> bool:
        """Adds the rows that fill a plain tensor; False where torch's planner must look at it."""
        assert self._metadata is not None
        if type(target) not in (torch.Tensor, torch.nn.Parameter):
            return False
        stored = self._metadata.state_dict_metadata[name]
        # One with a shape of its own for the whole is a shard.
        if type(stored) is not TensorStorageMetadata or hasattr(target, "global_shape"):
            return False
        if any(has > wants for has, wants in zip(stored.size, target.shape, strict=True)):
            return False
        parts = [(chunk.offsets, chunk.sizes) for chunk in stored.chunks]
        require_all(name, stored.size, parts, (0,) * len(stored.size))
        whole = target.detach()
        dtype = stored.properties.dtype
        found = []
        for chunk in stored.chunks:
            info = self.reader.storage_data.get(MetadataIndex(name, chunk.offsets))
            if info is None or info.transform_descriptors:
                return False
            part = whole
            if chunk.sizes != whole.shape:
                for dim, place in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                    part = part.narrow(dim, *place)
            number = reading.number(info.relative_path, name)
            found.append((name, number, info.offset, info.length, dtype, chunk.sizes, (), (), part))
        reading.rows.extend(found)
        return True


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
    """Of the same kind as a meta tensor, as torch makes it, on the process group's device."""
    device: Any = torch.get_default_device()
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


class _Freeing:
    """Gives a tensor's memory back and takes it anew, untouched: where all that lies in it will be
    read, and nobody else may hold its address."""

    def __init__(self, targets: list[torch.Tensor]) -> None:
        self._whole: set[int] = set()
        covered: dict[int, int] = {}
        # Tied tensors are read twice.
        for tensor in {(t.data_ptr(), t.nbytes): t for t in targets}.values():
            storage = tensor.untyped_storage()
            covered[storage._cdata] = covered.get(storage._cdata, 0) + tensor.nbytes
            if covered[storage._cdata] == storage.nbytes() and storage.resizable():
                self._whole.add(storage._cdata)

    def __call__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._whole:
            return
        self._whole.remove(storage._cdata)
        size = storage.nbytes()
        storage.resize_(0)
        storage.resize_(size)


def _read_metadata(reader: FileSystemReader, rank: int) -> Metadata:
    """The common metadata, or this rank's own where ranks saved without collectives."""
    try:
        return reader.read_metadata()
    except FileNotFoundError:
        try:
            return reader.read_metadata(rank=rank)
        except FileNotFoundError:
            pass
        raise
