"""What is written of a state dict: what one rank has, and what all ranks make of it.

1. :class:`RankState` flattens the state dict of a rank. :meth:`RankState.told` is what other ranks
   must know of it: a template of plain tensors, DTensors and objects
   (csrc/planning/state_template.h), and a plan of torch's planner for the rest (ShardedTensor and
   others).
2. :class:`GlobalPlan` is made of what all ranks have told, on the coordinator. It gives what
   several ranks have to one of them, and builds the rest's plan with torch's planner.
3. :meth:`RankState.values` finds what a rank's part of the plan wants.
4. :meth:`GlobalPlan.encode` makes the metadata of what was planned and what was written.
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
    """What one rank has, as the others must know it."""

    template: bytes | str  # of what the engine plans, alike on most ranks; see Ranks.share
    parts: bytes  # of its DTensors, which are here
    rest: SavePlan  # of all else, by torch's planner

    def to_send(self, ranks: Ranks) -> Told:
        """The same, with what stands for its template."""
        assert isinstance(self.template, bytes)
        return dataclasses.replace(self, template=ranks.share(self.template))

    def received(self, ranks: Ranks) -> Told:
        """On the coordinator: the same with its template."""
        return dataclasses.replace(self, template=ranks.shared(self.template))


@dataclass
class Task:
    """What one rank shall write."""

    rows: Sequence[int]  # of its template
    rest: SavePlan


class RankState:
    """What one rank has.

    Args:
        state_dict: without ``Stateful`` values.
        storage_meta: the writer's.

    Raises:
        CheckpointError: a tensor has no values, or this rank's elements of it are not consecutive.
        ValueError: two values have the same name.
    """

    def __init__(
        self, state_dict: StateDict, storage_meta: StorageMeta | None, is_coordinator: bool
    ) -> None:
        #: When it began, when it knew what to write, when it had found that.
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
        #: What a plan depends on; None where that is not known.
        self.structure: Any = None if known is None else (self._template, self._parts, known)

    def told(self) -> Told:
        """What other ranks must know of it."""
        return Told(self._template, self._parts, self._planner.create_local_plan())

    def replicated(self) -> tuple[list[torch.Tensor], list[Any]]:
        """The plain tensors and the objects, which are taken to be the same on all ranks."""
        rows = [row for row in self._flat.others() if self._flat.is_object(row)]
        return self._flat.plain(), [self._flat.value(row) for row in rows]

    @no_gc()
    def values(
        self, task: Task, on_object: Callable[[], None] = lambda: None
    ) -> tuple[list[str], list[Any]]:
        """Names and values of what this rank writes: the rows, then the rest.

        Args:
            on_object: called after each value that is not a plain tensor has been found.

        Raises:
            CheckpointError: one cannot be pickled.
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
        """Adds to what has been written how long it took until now."""
        moments = [*self._moments, time.perf_counter()]
        plan, find, write = (round(end - begin, 4) for begin, end in pairwise(moments))
        written.seconds = plan, find, write
        return written

    def forget(self) -> None:
        """Lets go of all values."""
        del self._flat
        self._planner.state_dict = {}

    def _object(self, name: str, value: Any) -> Any:
        self._planner.state_dict[name] = value
        try:
            found = resolve(self._planner, WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
        except Exception as error:
            raise unpicklable(name, value, error) from None
        # AppState looks at what it wraps, by the caller's names.
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
    """What all ranks write.

    Args:
        told: by rank.

    Raises:
        CheckpointError: what ranks have does not go together; by name and ranks.
    """

    @no_gc()
    def __init__(self, told: list[Told]) -> None:
        self.told = told
        # Templates have been received.
        texts = [(cast(bytes, of_rank.template), of_rank.parts) for of_rank in told]
        try:
            self._engine = _core.GlobalPlan(texts)
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        rest, self._rest_metadata = _torchs_planner().create_global_plan([t.rest for t in told])
        self._rest = list(rest)  # by rank

    def has_names_of(self, other: GlobalPlan) -> bool:
        """Whether another plan writes the same, by the same ranks."""
        return self is other or self._names() == other._names()

    def tasks(self) -> list[Task]:
        """By rank."""
        return [Task(self._engine.owned(rank), rest) for rank, rest in enumerate(self._rest)]

    def replicated_names(self) -> list[list[str]]:
        """Lists the names of each rank's :meth:`RankState.replicated`: tensors, then objects."""
        return [self._engine.replicated_names(rank) for rank in range(len(self._rest))]

    @functools.cached_property
    def paths(self) -> dict[str, tuple[Any, ...]]:
        """Where each name lies in the nested state dict."""
        return self._engine.paths()

    @no_gc()
    def encode(self, written: list[Written], storage_meta: StorageMeta | None) -> bytes:
        """The contents of ``.metadata``.

        Args:
            written: by rank.

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
        """Encodes what metadata says of the plan alone, without the GIL; once.

        What fails is left to :meth:`encode`, which does it again.
        """
        if not self._rest_metadata.state_dict_metadata:
            with suppress(MemoryError):
                self._engine.describe()

    def changes(
        self, before: list[Written], now: list[Written], counter: str
    ) -> tuple[str | None, dict[str, list[str]]]:
        """How two saves of this plan differ, by their checksums.

        Args:
            before, now: by rank.
            counter: the name of a number that always moves.

        Returns:
            The first other number that has changed, and where there is one the tensors of each
            group of which nothing has. A group is what lies under one key of the state dict.
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
        """By rank, what the engine plans and which items torch's planner does."""
        return [
            (told.template, told.parts, [item.index for item in rest.items])
            for told, rest in zip(self.told, self._rest, strict=True)
        ]

    def _of_rest(self, files: list[_core.WrittenFiles], rank: int) -> list[Place]:
        """Where a rank has stored what torch's planner plans: behind all else."""
        return files[rank].places(len(self._engine.owned(rank)))


def _torchs_planner() -> DefaultSavePlanner:
    # Flattening has been done.
    return DefaultSavePlanner(flatten_state_dict=False)


def _require_values(name: str, value: Any) -> None:
    # Not is_meta, which a ShardedTensor of several shards does not have.
    local = getattr(value, "_local_tensor", value)
    if isinstance(value, torch.Tensor) and local.device.type == "meta":
        raise CheckpointError(
            f"{name}: a tensor on the meta device has no values to save; give it memory and values "
            "first (module.to_empty(device=...), then initialize or load it), or leave it out"
        )
