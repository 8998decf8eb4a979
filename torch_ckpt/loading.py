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
from dataclasses import dataclass, field
from functools import partial
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

from torch_ckpt import _C
from torch_ckpt.collector import no_gc
from torch_ckpt.coordination import Ranks
from torch_ckpt.cover import require_all, require_cover
from torch_ckpt.errors import CheckpointError, LoadMismatch
from torch_ckpt.growth import chunks_here, zero_what_is_not_stored
from torch_ckpt.metrics import LOGGER, warn
from torch_ckpt.precision import loses_precision
from torch_ckpt.reader import LEAST_INFLIGHT_BYTES, FileSystemReader, Reading
from torch_ckpt.renaming import Rename, rename_in
from torch_ckpt.replicas import read_once
from torch_ckpt.text import MOST_NAMES, some_of

StateDict = dict[str, Any]

T = TypeVar("T")

#: Patterns as of :mod:`fnmatch`, or a function of the fully qualified name.
Names = Iterable[str] | Callable[[str], bool] | None

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


@dataclass
class LoadReport:
    """How a state dict and a checkpoint compare. Names are fully qualified ones.

    Attributes:
        loaded: what both have and what fits.
        missing: what the checkpoint does not have.
        unexpected: what only the checkpoint has; no hindrance to a load.
        shapes: (name, stored, wanted) of tensors whose shape does not fit.
        kinds: (name, stored, wanted) of what is a tensor there and something else here, or the
            other way round.
        dtypes: (name, stored, wanted) of tensors that are converted.
        grown: (name, stored, wanted) of tensors that ``zero_fill`` fills up.
        absent: keys at the top, of dicts and ``Stateful`` values of which nothing can be loaded.
        truncated: (name, stored, wanted) of tensors of which ``allow_shape_mismatch`` loads a part;
            one that is larger in another dimension is in ``grown``, too.
    """

    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shapes: list[tuple[str, torch.Size, torch.Size]] = field(default_factory=list)
    kinds: list[tuple[str, str, str]] = field(default_factory=list)
    dtypes: list[tuple[str, torch.dtype, torch.dtype]] = field(default_factory=list)
    grown: list[tuple[str, torch.Size, torch.Size]] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    truncated: list[tuple[str, torch.Size, torch.Size]] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """Whether all of the state dict can be loaded."""
        return not (self.missing or self.shapes or self.kinds)

    @property
    def narrowed(self) -> list[str]:
        """Names of the tensors whose dtype holds less than the stored one."""
        return [name for name, stored, wanted in self.dtypes if loses_precision(stored, wanted)]

    @property
    def skipped(self) -> list[str]:
        """What a load with ``strict=False`` leaves as it is: each name, with the reason."""
        return [
            *(f"{name} (missing)" for name in self.missing),
            *(f"{n} (stored {list(has)}, wanted {list(wants)})" for n, has, wants in self.shapes),
            *(f"{name} (stored {has}, wanted {wants})" for name, has, wants in self.kinds),
        ]

    def __str__(self) -> str:
        def sized(entries: list[tuple[str, torch.Size, torch.Size]]) -> list[str]:
            return [f"{n}: stored {list(has)}, wanted {list(wants)}" for n, has, wants in entries]

        parts = [
            ("missing in the checkpoint", self.missing),
            ("of another shape", sized(self.shapes)),
            ("of another kind", [f"{n}: stored {a}, wanted {b}" for n, a, b in self.kinds]),
            ("only in the checkpoint", self.unexpected),
            ("of another dtype", [f"{n}: stored {a}, wanted {b}" for n, a, b in self.dtypes]),
            ("larger than stored", sized(self.grown)),
            ("smaller than stored", sized(self.truncated)),
        ]
        lines = [f"{len(self.loaded)} names fit"]
        for title, entries in parts:
            if not entries:
                continue
            lines.append(f"{len(entries)} {title}:")
            lines.extend(f"  {entry}" for entry in entries[:MOST_NAMES])
            if len(entries) > MOST_NAMES:
                lines.append(f"  and {len(entries) - MOST_NAMES} more")
        return "\n".join(lines)

    def add(self, other: LoadReport) -> None:
        """Adds what a report about another part of the state dict says."""
        self.loaded += other.loaded
        self.missing += other.missing
        self.unexpected = sorted(set(self.unexpected) & set(other.unexpected))
        self.shapes += other.shapes
        self.kinds += other.kinds
        self.dtypes += other.dtypes
        self.grown += other.grown
        self.absent += other.absent
        self.truncated += other.truncated


@dataclass(frozen=True)
class ReadMemory:
    """What a load takes, in bytes.

    Attributes:
        target_bytes: of the tensors on this rank that are loaded.
        stored_bytes: that are wanted from the files, by this rank.
        beyond_targets_bytes: the most that is held beside the targets at any time.
        least_inflight_bytes: the smallest ``max_inflight_bytes`` with which the load works.
    """

    target_bytes: int
    stored_bytes: int
    beyond_targets_bytes: int
    least_inflight_bytes: int


class _Planner(DefaultLoadPlanner):
    """torch's planner over a part of the state dict."""

    def look_at(self, values: StateDict, metadata: Metadata) -> None:
        """As set_up_planner, which gives memory to all meta tensors, loaded or not."""
        self.original_state_dict, self.metadata = values, metadata
        self.state_dict, self.mappings = flatten_state_dict(_flatten_sharded_tensors(values))

    def make_real(self, names: Iterable[str]) -> None:
        """Puts tensors with memory in the place of meta tensors, in the caller's dicts too."""
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
        """With tensors that have memory in the place of the meta tensors that are loaded."""
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
        # Those of growth.py are equal to others that they go with.
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


def is_stateful(value: Any) -> bool:
    """As isinstance(value, Stateful), which takes 20 microseconds before Python 3.12."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def value_of(value: Any) -> Any:
    """The ``state_dict()`` of a ``Stateful`` value, others as they are; may be collective."""
    return value.state_dict() if is_stateful(value) else value


def load_values(
    state_dict: StateDict,
    load: Load,
    ranks: Ranks,
    *,
    strict: Strict,
    process_group: dist.ProcessGroup | None,
) -> LoadReport:
    """Loads all values of a state dict.

    Args:
        strict: refuse to load only a part.

    Raises:
        CheckpointException: on every rank, with the cause of each rank that failed.
    """
    # What a Stateful does may be collective, so every rank asks in the same order.
    keys = sorted(state_dict)

    def prepare() -> tuple[StateDict, Prepared]:
        values = {key: value_of(state_dict[key]) for key in keys}
        prepared = load.prepare(values)
        load.require_fit(prepared.report, strict)
        return values, prepared

    values, prepared = _agree(ranks, load, prepare, lambda made: made[1].report)

    def read() -> None:
        if load.reader.read_once and ranks.distributed:
            read_once(load.reader, lambda: load.begun(prepared), process_group)
        else:
            load.reader.read(load.begun(prepared))

    def take() -> None:
        for key in keys:
            if load.takes(key, prepared):
                _take(state_dict, key, values[key])

    ranks.all_succeed("load", read)
    ranks.all_succeed("finish", take)
    return prepared.report


def load_values_freeing(
    state_dict: StateDict, load: Load, ranks: Ranks, *, strict: Strict
) -> LoadReport:
    """The same for a state that fits into memory only once: key by key, since what ``state_dict()``
    returns may be a copy, and each destination is let go of before its replacement is read."""
    # All ranks are asked about a Stateful, or none: what it does may be collective.
    stateful = sorted(key for key in state_dict if is_stateful(state_dict[key]))
    plain = sorted(state_dict.keys() - set(stateful))
    steps = [plain, *([key] for key in stateful)]
    total = LoadReport()

    def begin() -> None:
        # All names of the checkpoint, of which each key's comparison leaves fewer.
        total.unexpected = load.compare({}).unexpected

    def compare(keys: list[str]) -> None:
        for key in keys:
            total.add(load.compare({key: value_of(state_dict[key])}))

    def read_key(key: str) -> None:
        values = {key: value_of(state_dict[key])}
        is_itself = values[key] is state_dict[key]
        prepared = load.prepare(values)
        is_taken = load.takes(key, prepared)
        # Nothing but the reading holds on to the values.
        reading = load.begun(prepared)
        del prepared

        def let_go() -> None:
            if is_itself:
                state_dict[key] = None

        load.read_freeing(reading, let_go)
        if is_taken:
            _take(state_dict, key, values[key])

    def read(keys: list[str]) -> None:
        for key in keys:
            read_key(key)

    _same_everywhere(ranks, begin, stateful)
    for keys in steps:
        ranks.all_succeed("plan", partial(compare, keys))
    _agree(ranks, load, lambda: load.require_fit(total, strict), lambda _none: total)
    for keys in steps:
        ranks.all_succeed("load", partial(read, keys))
    return total


def _take(state_dict: StateDict, key: str, value: Any) -> None:
    if is_stateful(state_dict[key]):
        state_dict[key].load_state_dict(value)
    else:
        state_dict[key] = value


def _agree(
    ranks: Ranks, load: Load, local: Callable[[], T], report_of: Callable[[T], LoadReport]
) -> T:
    """Runs it on all ranks; raises on all where a pattern has matched on none of them, or where
    they have read the metadata of different saves. Rank 0 tells what is skipped on any."""
    outcome: list[T] = []

    def on_this_rank() -> tuple[list[str], str | None, list[str]]:
        outcome.append(local())
        return load.unmatched, load.reader.version, report_of(outcome[0]).skipped

    def check(found: list[tuple[list[str], str | None, list[str]]]) -> list[list[str]]:
        if len({version for _unmatched, version, _skipped in found}) > 1:
            raise CheckpointError(
                f"{load.reader.checkpoint_id}: ranks have read the metadata of different saves: "
                "the checkpoint was replaced meanwhile; load again"
            )
        unmatched = [of_rank for of_rank, _version, _skipped in found]
        require_matches(p for p in unmatched[0] if all(p in others for others in unmatched))
        skipped = dict.fromkeys(name for _unmatched, _version, names in found for name in names)
        return [list(skipped), *([] for _other in found[1:])]

    skipped = ranks.reduce_scatter("plan", on_this_rank, check)
    if skipped:
        path, loaded = load.reader.checkpoint_id, report_of(outcome[0]).loaded
        LOGGER.info("%s: %d names fit, %d are skipped", path, len(loaded), len(skipped))
        # It names the line that calls load.
        warn(f"{path}: not loaded, as strict=False allows: {some_of(skipped)}", stacklevel=4)
    return outcome[0]


def _same_everywhere(ranks: Ranks, local: Callable[[], None], keys: list[str]) -> None:
    """Runs it on all ranks; raises on all where they have other keys."""

    def on_this_rank() -> list[str]:
        local()
        return keys

    def check(keys_of_all: list[list[str]]) -> list[None]:
        for rank, others in enumerate(keys_of_all):
            if others != keys_of_all[0]:
                raise ValueError(
                    "free_before_read needs the same Stateful values on all ranks; rank 0 has "
                    f"{keys_of_all[0][:MOST_NAMES]}, rank {rank} {others[:MOST_NAMES]}"
                )
        return [None] * len(keys_of_all)

    ranks.reduce_scatter("plan", on_this_rank, check)


def require_matches(unmatched: Iterable[str]) -> None:
    """Raises ValueError where there are patterns that match nothing."""
    patterns = ", ".join(map(repr, unmatched))
    if patterns:
        raise ValueError(f"no name in the state dict matches {patterns}")


def estimate(load: Load, values: StateDict) -> ReadMemory:
    """What reading into the values takes. Reads the metadata alone."""
    prepared = load.prepare(values)
    require_matches(load.unmatched)
    load.require_fit(prepared.report, strict=True)
    reading, chosen = prepared.reading, prepared.chosen
    rows = [
        (
            dtype.itemsize,
            target,
            # Of a meta tensor the load makes a plain one.
            target.is_meta or (_C.is_plain(target) and not (target.is_conj() or target.is_neg())),
        )
        for _n, _f, _o, _l, dtype, _s, _ro, _rl, target in reading.rows
    ]
    limit = load.reader.max_inflight_bytes
    objects = [info.length for _item, info in reading.byte_items]
    stored = sum(target.numel() * itemsize for itemsize, target, _plain in rows)
    # What the engine cannot write into by itself is read by way of a copy, some rows at a time.
    copies = [(t.numel() * itemsize, t) for itemsize, t, plain in rows if not plain]
    least = max((b // max(t.size(0) if t.dim() else 1, 1) for b, t in copies), default=0)
    least = max([least, *objects])
    scratch = load.reader.thread_count * _C.load_chunk_bytes
    if any(target.is_cuda for _itemsize, target, _plain in rows):
        scratch *= 2
    scratch = min(scratch, limit) if rows else 0
    held = min(sum(b for b, _t in copies), limit // 2)
    wave = min(sum(objects), max([load.reader.wave_bytes, *objects]))
    return ReadMemory(
        target_bytes=sum(_local_bytes(value) for value in chosen.values()),
        stored_bytes=stored + sum(objects),
        beyond_targets_bytes=min(max(scratch + held, wave), limit),
        least_inflight_bytes=max(least + _C.least_scratch_bytes, LEAST_INFLIGHT_BYTES),
    )


def _local_bytes(value: Any) -> int:
    try:
        chunks = chunks_here(value)
    except ValueError:
        return 0
    return sum(c.sizes.numel() for c in chunks) * int(value.dtype.itemsize)


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
