"""The plan for all ranks of a save, on the coordinator.

1. Every rank sends its :class:`Contents` (saving/save_state.py): a template of plain tensors,
   DTensors and objects (csrc/planning/state_template.h), and torch's plan for the other values
   (ShardedTensor, for example).
2. The coordinator builds a :class:`GlobalPlan` from these. It assigns the values that several ranks
   have to one of them, and plans the other values with torch's planner.
3. Each rank gets its :class:`Assignment`.
4. :meth:`GlobalPlan.encode` builds the metadata from the plan and the results of the writes.
"""

from __future__ import annotations

import functools
import json
from array import array
from dataclasses import dataclass, field
from typing import Any, cast

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from torch_ckpt import _core
from torch_ckpt._base.cycle_collector import no_gc
from torch_ckpt.checkpoint.metadata import DCP_VERSION, index_of
from torch_ckpt.errors import CheckpointError
from torch_ckpt.saving.copies import differing_copies, find_copies, text_of_copies
from torch_ckpt.saving.items import Written

StateDict = dict[str, Any]

#: File name, offset and length in bytes, and payload CRC-32 of one stored item.
Location = tuple[str, int, int, int]


@dataclass
class Contents:
    """The inputs of a plan from one rank.

    Attributes:
        template: names, kinds, dtypes and sizes of the values that the engine plans, which are the
            same on most ranks. During its transfer, a token (see :meth:`Exchange.share`).
        shards: offsets and sizes of this rank's shards of DTensors.
        torch_plan: torch's plan of all other items; None if there are none.
        layouts: a hash of the layout of each DTensor in ``torch_plan``, by name; see
            :func:`torch_ckpt.saving.copies.layouts_of`. Set if there are any.
    """

    template: bytes | str
    shards: bytes
    torch_plan: SavePlan | None
    layouts: dict[str, int] | None = field(default=None, init=False)


@dataclass
class Assignment:
    """The items that one rank writes.

    Attributes:
        numbers: encoded numbers of values in the template; see ``FlatState.sources``.
        torch_plan: the items that torch's planner assigns; None if there are none.
        copies: encoded numbers of values whose checksums the rank must send; see
            :meth:`GlobalPlan.require_equal_copies`. Set if there are any.
        torch_copies: items of torch's planner whose checksums the rank must send. Set if there are
            any.
    """

    # Most plans have no copies. Then the attributes are not in the message to the rank.
    numbers: bytes
    torch_plan: SavePlan | None
    copies: bytes = field(default=b"", init=False)
    torch_copies: tuple[WriteItem, ...] = field(default=(), init=False)

    @property
    def count(self) -> int:
        """Number of values in the template, without the items of torch's planner."""
        return len(self.numbers) // 4


class GlobalPlan:
    """The plan for all ranks.

    Args:
        contents: the contents of each rank, indexed by rank.

    Attributes:
        engine: the engine's part of the plan.
        assignments: the assignments, indexed by rank.
        torch_metadata: torch's metadata of the items that torch's planner assigns, by name.

    Raises:
        CheckpointError: the contents of several ranks contradict each other. The error gives names
            and ranks.
    """

    @no_gc()
    def __init__(self, contents: list[Contents]) -> None:
        self.contents = contents
        texts = [(cast(bytes, of_rank.template), of_rank.shards) for of_rank in contents]
        try:
            self.engine = _core.GlobalPlan(texts)
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        self._torch_items: list[list[WriteItem]] = [[] for _ in contents]  # indexed by rank
        self.torch_metadata: dict[str, Any] = {}
        self.assignments = [
            Assignment(self.engine.assignment(rank), None) for rank in range(len(contents))
        ]
        for rank, assignment in enumerate(self.assignments):
            if copies := self.engine.copies(rank):
                assignment.copies = copies
        if any(of_rank.torch_plan for of_rank in contents):
            plans = [of_rank.torch_plan or SavePlan([]) for of_rank in contents]
            found = find_copies(plans, [of_rank.layouts for of_rank in contents])
            for assignment, items in zip(self.assignments, found, strict=True):
                if items:
                    assignment.torch_copies = tuple(items)
            planner = DefaultSavePlanner(flatten_state_dict=False)
            plans, metadata = planner.create_global_plan(plans)
            self.torch_metadata = metadata.state_dict_metadata
            self._torch_items = [list(plan.items) for plan in plans]
            for assignment, plan in zip(self.assignments, plans, strict=True):
                assignment.torch_plan = plan if plan.items else None

    def writes_same_items(self, other: GlobalPlan) -> bool:
        """Returns True if another plan writes the same items on the same ranks."""
        if self is other:
            return True
        one, two = (
            [
                (of_rank.template, of_rank.shards, [item.index for item in items])
                for of_rank, items in zip(plan.contents, plan._torch_items, strict=True)
            ]
            for plan in (self, other)
        )
        return one == two

    def require_equal_copies(self, written: list[Written]) -> None:
        """Compares the copies of sharded tensors (saving/copies.py), before the commit.

        Args:
            written: the results of the writes, indexed by rank.

        Raises:
            CheckpointError: copies differ. The error gives names, ranks and meshes.
        """
        if not any(one.copies or one.torch_copies for one in self.assignments):
            return
        differing = self.engine.differing_copies([of_rank.checksums for of_rank in written])
        torch_copies = [one.torch_copies for one in self.assignments]
        if any(torch_copies):
            sent = [
                array("I", of_rank.checksums[len(one.copies) :])
                for of_rank, one in zip(written, self.assignments, strict=True)
            ]
            differing += differing_copies(torch_copies, sent)
        if differing:
            raise CheckpointError(text_of_copies(differing))

    @functools.cached_property
    def paths(self) -> dict[str, tuple[Any, ...]]:
        """The path of each name in the nested state dict."""
        return self.engine.paths()

    @no_gc()
    def encode(
        self, written: list[Written], storage_meta: StorageMeta | None
    ) -> _core.EncodedMetadata:
        """Returns the contents of ``.metadata``.

        Args:
            written: the results of the writes, indexed by rank.

        Raises:
            CheckpointError: ranks have different kinds of values under one name.
        """
        files = [of_rank.files for of_rank in written]
        torch_index = self._torch_index(files) if self.torch_metadata else None
        meta = [] if storage_meta is None else [*vars(storage_meta).items()]
        texts = [(name, text) for name, text in meta if text is None or isinstance(text, str)]
        seconds = [[round(phase, 4) for phase in of_rank.seconds] for of_rank in written]
        phases = json.dumps(seconds, separators=(",", ":"))
        return self.engine.encode(files, torch_index, texts, DCP_VERSION, phases)

    def changes(
        self, before: list[Written], now: list[Written], counter: str
    ) -> tuple[str | None, dict[str, list[str]]]:
        """Compares two saves of this plan by their checksums.

        Args:
            before, now: the results of the writes, indexed by rank.
            counter: name of a number that changes in every save.

        Returns:
            The name of the first other number that has changed; None if no number has. Then, if a
            number has changed, the tensors of each group in which nothing has changed. A group is
            all values under one key of the state dict.
        """
        files = [[of_rank.files for of_rank in written] for written in (before, now)]
        moved, changed, unchanged = self.engine.changes(files[0], files[1], counter)
        if moved is None:
            return None, {}
        for rank, items in enumerate(self._torch_items):
            crcs = [[place[3] for place in self._torch_locations(of_all, rank)] for of_all in files]
            for item, old, new in zip(items, *crcs, strict=True):
                path = self.paths.get(item.index.fqn, ())
                group = str(path[0]) if len(path) > 1 else ""
                if old != new:
                    changed.append(group)
                elif item.index.fqn not in unchanged.setdefault(group, []):
                    unchanged[group].append(item.index.fqn)
        for group in changed:
            unchanged.pop(group, None)
        return moved, unchanged

    def _torch_index(self, files: list[_core.WrittenFiles]) -> _core.CheckpointIndex:
        """Returns the index of the items planned by torch."""
        for name in self.torch_metadata:
            if self.engine.plans(name):
                raise CheckpointError(
                    f"{name}: ranks have different kinds of tensors or objects under this name"
                )
        storage = {
            item.index: _StorageInfo(*place[:3])
            for rank, items in enumerate(self._torch_items)
            for item, place in zip(items, self._torch_locations(files, rank), strict=True)
        }
        return index_of(Metadata(self.torch_metadata, storage_data=storage), "torch's plan")

    def _torch_locations(self, files: list[_core.WrittenFiles], rank: int) -> list[Location]:
        """Returns the locations of a rank's items planned by torch, which follow the engine's."""
        return files[rank].locations(self.assignments[rank].count)
