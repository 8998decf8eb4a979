"""The state dict of one save on one rank.

1. :class:`SaveState` flattens the state dict (csrc/torch/flat_state.h). A snapshot keeps aliases of
   the tensors and copies of the objects, so that the state dict may change afterwards.
2. :meth:`SaveState.plan` checks the values. torch's planner plans those that the engine does not
   plan, such as ShardedTensors.
3. :meth:`SaveState.contents` returns the part that the coordinator must know.
4. :meth:`SaveState.values` looks up the values of this rank's assignment.
5. :meth:`SaveState.release` releases all values, when they have been copied.
"""

from __future__ import annotations

import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from torch_ckpt import _C
from torch_ckpt._base.cycle_collector import no_gc
from torch_ckpt.checkpoint.chunks import require_consecutive
from torch_ckpt.checkpoint.flat_state import flat_state
from torch_ckpt.checkpoint.objects import pickled, unpicklable, warn_of_what_will_not_load
from torch_ckpt.errors import CheckpointError
from torch_ckpt.saving.global_plan import Assignment, Contents
from torch_ckpt.saving.items import Written, as_value, resolve
from torch_ckpt.saving.snapshots import snapshot_of
from torch_ckpt.saving.structure import structure_of

StateDict = dict[str, Any]


class SaveState:
    """The values of one rank. The docstring of the module lists the steps.

    Args:
        state_dict: the state dict, without ``Stateful`` values.
        snapshot: keep aliases of tensors and copies of objects.

    Attributes:
        structure: the inputs of a plan, set by :meth:`plan`; None if they are unknown.
        resolved: number of values that :meth:`values` has pickled or got from torch's planner.

    Raises:
        ValueError: two values have the same name.
        CheckpointError: an object cannot be copied for a snapshot.
    """

    @no_gc()
    def __init__(self, state_dict: StateDict, *, snapshot: bool = False) -> None:
        begin = time.perf_counter()
        self._watch = _C.SourceWatch() if snapshot else None
        self._flat = flat_state(state_dict, self._watch)
        if self._watch is not None:
            for row in self._flat.others():
                name, value = self._flat.name(row), self._flat.value(row)
                kept = snapshot_of(value, name, self._watch)
                if kept is not value:
                    self._flat.replace(row, kept)
        #: torch's planner; None if the engine plans all values.
        self._planner: DefaultSavePlanner | None = None
        self._template, self._shards = b"", b""
        self.structure: Any = None
        self.resolved = 0
        self._walk_seconds = time.perf_counter() - begin
        #: Times at which planning began, planning ended, and the lookup of values ended.
        self._moments: list[float] = []

    # --- the plan --------------------------------------------------------------------------------

    @no_gc()
    def plan(self, storage_meta: StorageMeta | None, is_coordinator: bool) -> None:
        """Checks the values and prepares :meth:`contents`.

        Raises:
            CheckpointError: a tensor has no values, or this rank's part of a DTensor is not a
                single block.
        """
        self._moments.append(time.perf_counter())
        torch_values = {}
        for row in self._flat.others():
            name, value = self._flat.name(row), self._flat.value(row)
            _require_values(name, value)
            require_consecutive(name, value)
            if not self._flat.is_object(row):
                torch_values[name] = value
        for row in self._flat.on_meta():
            _require_values(self._flat.name(row), self._flat.value(row))
        if torch_values:
            # The state dict is already flat.
            self._planner = DefaultSavePlanner(flatten_state_dict=False)
            self._planner.set_up_planner(torch_values, storage_meta, is_coordinator)
        self._template, self._shards = self._flat.contents()
        known = structure_of(torch_values) if torch_values else []
        self.structure = None if known is None else (self._template, self._shards, known)

    def contents(self) -> Contents:
        """Returns the part that the coordinator must know."""
        torch_plan = None if self._planner is None else self._planner.create_local_plan()
        return Contents(self._template, self._shards, torch_plan)

    def replicated(self) -> tuple[list[torch.Tensor], list[Any]]:
        """Returns the plain tensors and the objects, which are assumed to be identical on all
        ranks."""
        rows = [row for row in self._flat.others() if self._flat.is_object(row)]
        return self._flat.plain(), [self._flat.value(row) for row in rows]

    # --- the write -------------------------------------------------------------------------------

    @no_gc()
    def values(self, assignment: Assignment) -> tuple[list[str], list[Any]]:
        """Returns the names and the values of an assignment: the engine's items first, then the
        items planned by torch.

        Raises:
            CheckpointError: a value cannot be pickled.
        """
        self._moments.append(time.perf_counter())
        names, values, others = self._flat.sources(assignment.rows)
        for number in others:
            name, value = names[number], values[number]
            if self._flat.is_object(assignment.rows[number]):
                values[number] = self._pickle_object(name, value)
                self.resolved += 1
            elif isinstance(value, torch.Tensor):
                values[number] = as_value(value)
        if self._planner is not None and assignment.torch_plan is not None:
            for item in self._planner.finish_plan(assignment.torch_plan).items:
                names.append(item.index.fqn)
                values.append(self._resolve(self._planner, item))
                self.resolved += 1
        self._moments.append(time.perf_counter())
        return names, values

    def add_seconds(self, written: Written) -> Written:
        """Adds the durations until now to a result."""
        moments = [*self._moments, time.perf_counter()]
        plan, find, write = (end - begin for begin, end in pairwise(moments))
        plan += self._walk_seconds
        written.seconds = round(plan, 4), round(find, 4), round(write, 4)
        return written

    # --- the sources of a snapshot ---------------------------------------------------------------

    @property
    def devices(self) -> list[torch.device]:
        """The CUDA devices of the tensors of a snapshot."""
        return [] if self._watch is None else self._watch.devices

    def changed(self) -> list[str]:
        """Returns the names of the tensors that were written to since the snapshot was taken."""
        return [] if self._watch is None else self._watch.changed()

    def release(self) -> None:
        """Releases all values."""
        if self._watch is not None:
            self._watch.release()
        self._flat = _C.FlatState({}, lambda _: [])
        self._planner = None

    # --- private ---------------------------------------------------------------------------------

    def _pickle_object(self, name: str, value: Any) -> Any:
        try:
            found = pickled(value)
        except Exception as error:
            raise unpicklable(name, value, error) from None
        # AppState wraps values in this type, and has checked them under the caller's names.
        if type(value) is not SimpleNamespace:
            warn_of_what_will_not_load(name, value, found)
        return found

    def _resolve(self, planner: DefaultSavePlanner, item: WriteItem) -> Any:
        name = item.index.fqn
        value = planner.state_dict.get(name)
        if item.type == WriteItemType.BYTE_IO:
            return self._pickle_object(name, value)
        found = resolve(planner, item)
        if type(value) is not DTensor and not isinstance(found, torch.Tensor):
            warn_of_what_will_not_load(name, value, found)
        return found


def _require_values(name: str, value: Any) -> None:
    # is_meta raises for a ShardedTensor with several shards.
    local = getattr(value, "_local_tensor", value)
    if isinstance(value, torch.Tensor) and local.device.type == "meta":
        raise CheckpointError(
            f"{name}: a tensor on the meta device has no values to save; give it memory and values "
            "first (module.to_empty(device=...), then initialize or load it), or leave it out"
        )
