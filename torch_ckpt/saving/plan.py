"""The plan of a save: the contents of each rank, and what is made of them by all.

1. :class:`RankState` flattens a rank's state dict. :meth:`RankState.told` returns the part that
   other ranks must know: a template of plain tensors, DTensors and objects
   (csrc/planning/state_template.h), and torch's plan for the other values (ShardedTensor, for
   example).
2. The coordinator builds a :class:`GlobalPlan` from these. It assigns what several ranks have to
   one of them, and plans the other values with torch's planner.
3. :meth:`RankState.values` looks up the values of a rank's assignment.
4. :meth:`GlobalPlan.encode` builds the metadata from the plan and the results of the writes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from torch_ckpt import _C, _core
from torch_ckpt._base.cycle_collector import no_gc
from torch_ckpt.checkpoint.chunks import require_consecutive
from torch_ckpt.checkpoint.flat_state import flat_state
from torch_ckpt.checkpoint.metadata import DCP_VERSION, index_of
from torch_ckpt.checkpoint.objects import unpicklable, warn_of_what_will_not_load
from torch_ckpt.errors import CheckpointError
from torch_ckpt.ranks.meeting import Ranks
from torch_ckpt.saving.items import Written, as_value, resolve
from torch_ckpt.saving.structure import structure_of

StateDict = dict[str, Any]

#: (file name, offset, length, payload CRC-32) of one stored item, in bytes.
Place = tuple[str, int, int, int]


@dataclass
class Told:
    """One rank's contents, in the form that it sends to the coordinator."""

    template: bytes | str  # of the engine's plan, identical on most ranks; see Ranks.share
    parts: bytes  # of the DTensors: the parts that this rank has
    rest: SavePlan  # all other items, by torch's planner

    def to_send(self, ranks: Ranks) -> Told:
        """Returns a copy with a token in place of the template."""
        assert isinstance(self.template, bytes)
        return dataclasses.replace(self, template=ranks.share(self.template))

    def received(self, ranks: Ranks) -> Told:
        """Returns a copy with the template in place of its token, on the coordinator."""
        return dataclasses.replace(self, template=ranks.shared(self.template))


@dataclass
class Task:
    """The items that one rank writes."""

    rows: Sequence[int]  # numbers in the template
    rest: SavePlan


class RankState:
    """The contents of one rank.

    Args:
        state_dict: the state dict, without ``Stateful`` values.
        storage_meta: the writer's StorageMeta.

    Raises:
        CheckpointError: a tensor has no values, or this rank's elements of it are not consecutive.
        ValueError: two values have the same name.
    """

    def __init__(
        self, state_dict: StateDict, storage_meta: StorageMeta | None, is_coordinator: bool
    ) -> None:
        #: Times of the start, of the end of planning, and of the end of the lookup of values.
        self._moments = [time.perf_counter()]
        self._flat = flat_state(state_dict)
        rest = {}
        for row in self._flat.others():
            name, value = self._flat.name(row), self._flat.value(row)
            _require_values(name, value)
            require_consecutive(name, value)
            if not self._flat.is_object(row):
                rest[name] = value
        for row in self._flat.on_meta():
            _require_values(self._flat.name(row), self._flat.value(row))
        self._planner = _torchs_planner()
        self._planner.set_up_planner(rest, storage_meta, is_coordinator)
        self._template, self._parts = _C.told_of(self._flat)
        known = structure_of(rest)
        #: The inputs of a plan; None if they are unknown.
        self.structure: Any = None if known is None else (self._template, self._parts, known)

    def told(self) -> Told:
        """Returns the part that other ranks must know."""
        return Told(self._template, self._parts, self._planner.create_local_plan())

    def replicated(self) -> tuple[list[torch.Tensor], list[Any]]:
        """Returns the plain tensors and the objects, which are assumed to be identical on all
        ranks."""
        rows = [row for row in self._flat.others() if self._flat.is_object(row)]
        return self._flat.plain(), [self._flat.value(row) for row in rows]

    @no_gc()
    def values(
        self, task: Task, on_object: Callable[[], None] = lambda: None
    ) -> tuple[list[str], list[Any]]:
        """Returns names and values of this rank's assignment: those of the engine's plan, then
        those of torch's.

        Args:
            on_object: called after each lookup of a value that is not a plain tensor.

        Raises:
            CheckpointError: a value cannot be pickled.
        """
        self._moments.append(time.perf_counter())
        names, values, others = _C.sources_of(self._flat, task.rows)
        for number in others:
            name, value = names[number], values[number]
            if self._flat.is_object(task.rows[number]):
                values[number] = self._object(name, value)
                on_object()
            elif isinstance(value, torch.Tensor):
                values[number] = as_value(value)
        for item in self._planner.finish_plan(task.rest).items:
            names.append(item.index.fqn)
            values.append(self._found(item))
            on_object()
        self._moments.append(time.perf_counter())
        return names, values

    def add_seconds(self, written: Written) -> Written:
        """Adds the durations until now to a result."""
        moments = [*self._moments, time.perf_counter()]
        plan, find, write = (round(end - begin, 4) for begin, end in pairwise(moments))
        written.seconds = plan, find, write
        return written

    def forget(self) -> None:
        """Releases all values."""
        del self._flat
        self._planner.state_dict = {}

    def _object(self, name: str, value: Any) -> Any:
        self._planner.state_dict[name] = value
        try:
            found = resolve(self._planner, WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
        except Exception as error:
            raise unpicklable(name, value, error) from None
        # AppState checks the values that it wraps, under the names of the caller.
        if type(value) is not SimpleNamespace:
            warn_of_what_will_not_load(name, value, found)
        return found

    def _found(self, item: WriteItem) -> Any:
        name = item.index.fqn
        value = self._planner.state_dict.get(name)
        if item.type == WriteItemType.BYTE_IO:
            return self._object(name, value)
        found = resolve(self._planner, item)
        if type(value) is not DTensor and not isinstance(found, torch.Tensor):
            warn_of_what_will_not_load(name, value, found)
        return found


class GlobalPlan:
    """The plan for all ranks.

    Args:
        contents: contents of each rank, by rank.

    Raises:
        CheckpointError: contents of several ranks contradict each other; names and ranks are given.
    """

    @no_gc()
    def __init__(self, contents: list[Told]) -> None:
        self.contents = contents
        # received() has been called for all of them.
        texts = [(cast(bytes, of_rank.template), of_rank.parts) for of_rank in contents]
        try:
            self._engine = _core.GlobalPlan(texts)
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        rest, self._rest_metadata = _torchs_planner().create_global_plan([c.rest for c in contents])
        self._rest = list(rest)  # by rank

    def has_names_of(self, other: GlobalPlan) -> bool:
        """Returns True if another plan writes the same items on the same ranks."""
        return self is other or self._names() == other._names()

    def tasks(self) -> list[Task]:
        """Returns the assignments, by rank."""
        return [Task(self._engine.owned(rank), rest) for rank, rest in enumerate(self._rest)]

    def replicated_names(self) -> list[list[str]]:
        """Returns the names of the values of :meth:`RankState.replicated`, by rank: tensors, then
        objects."""
        return [self._engine.replicated_names(rank) for rank in range(len(self._rest))]

    @functools.cached_property
    def paths(self) -> dict[str, tuple[Any, ...]]:
        """The path of each name in the nested state dict."""
        return self._engine.paths()

    @no_gc()
    def encode(self, written: list[Written], storage_meta: StorageMeta | None) -> bytes:
        """Returns the contents of ``.metadata``.

        Args:
            written: the results of the writes, by rank.

        Raises:
            CheckpointError: ranks have different kinds of values under one name.
        """
        files = [of_rank.files for of_rank in written]
        meta = [] if storage_meta is None else [*vars(storage_meta).items()]
        texts = [(name, text) for name, text in meta if text is None or isinstance(text, str)]
        rest = self._index_of_rest(files)
        phases = json.dumps([of_rank.seconds for of_rank in written], separators=(",", ":"))
        return self._engine.encode(files, rest, texts, DCP_VERSION, phases)

    def describe(self) -> None:
        """Encodes the part of the metadata that depends only on the plan, once and without the GIL.

        Ignores errors: :meth:`encode` encodes this part again.
        """
        if not self._rest_metadata.state_dict_metadata:
            with suppress(MemoryError):
                self._engine.describe()

    def changes(
        self, before: list[Written], now: list[Written], counter: str
    ) -> tuple[str | None, dict[str, list[str]]]:
        """Compares two saves of this plan by their checksums.

        Args:
            before, now: the results of the writes, by rank.
            counter: the name of a number that changes in every save.

        Returns:
            The name of the first other number that has changed, or None. If there is one: by group,
            the tensors of the groups in which nothing has changed. A group is all values under one
            key of the state dict.
        """
        files = [[of_rank.files for of_rank in written] for written in (before, now)]
        moved, changed, unchanged = self._engine.changes(files[0], files[1], counter)
        if moved is None:
            return None, {}
        for rank, rest in enumerate(self._rest):
            crcs = [[place[3] for place in self._of_rest(of_all, rank)] for of_all in files]
            for item, old, new in zip(rest.items, *crcs, strict=True):
                path = self.paths.get(item.index.fqn, ())
                group = str(path[0]) if len(path) > 1 else ""
                if old != new:
                    changed.append(group)
                elif item.index.fqn not in unchanged.setdefault(group, []):
                    unchanged[group].append(item.index.fqn)
        for group in changed:
            unchanged.pop(group, None)
        return moved, unchanged

    def _index_of_rest(self, files: list[_core.WrittenFiles]) -> _core.CheckpointIndex | None:
        described = self._rest_metadata.state_dict_metadata
        if not described:
            return None
        for name in described:
            if self._engine.plans(name):
                raise CheckpointError(
                    f"{name}: ranks have different kinds of tensors or objects under this name"
                )
        storage = {
            item.index: _StorageInfo(*place[:3])
            for rank, plan in enumerate(self._rest)
            for item, place in zip(plan.items, self._of_rest(files, rank), strict=True)
        }
        return index_of(Metadata(described, storage_data=storage), "rest")

    def _names(self) -> list[tuple[Any, ...]]:
        """Returns, by rank, the engine's templates and the items of torch's plan."""
        return [
            (of_rank.template, of_rank.parts, [item.index for item in rest.items])
            for of_rank, rest in zip(self.contents, self._rest, strict=True)
        ]

    def _of_rest(self, files: list[_core.WrittenFiles], rank: int) -> list[Place]:
        """Returns the locations of a rank's items of torch's plan, which come after all others."""
        return files[rank].places(len(self._engine.owned(rank)))


def _torchs_planner() -> DefaultSavePlanner:
    # The state dict is already flat.
    return DefaultSavePlanner(flatten_state_dict=False)


def _require_values(name: str, value: Any) -> None:
    # is_meta does not work for a ShardedTensor of several shards.
    local = getattr(value, "_local_tensor", value)
    if isinstance(value, torch.Tensor) and local.device.type == "meta":
        raise CheckpointError(
            f"{name}: a tensor on the meta device has no values to save; give it memory and values "
            "first (module.to_empty(device=...), then initialize or load it), or leave it out"
        )
