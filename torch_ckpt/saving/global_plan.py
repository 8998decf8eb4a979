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

import dataclasses
import functools
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from torch_ckpt import _core
from torch_ckpt._base.cycle_collector import no_gc
from torch_ckpt.checkpoint.metadata import DCP_VERSION, index_of
from torch_ckpt.errors import CheckpointError
from torch_ckpt.ranks.exchange import Exchange
from torch_ckpt.saving.items import Written

StateDict = dict[str, Any]

#: File name, offset and length in bytes, and payload CRC-32 of one stored item.
Place = tuple[str, int, int, int]


@dataclass
class Contents:
    """The inputs of a plan from one rank.

    Attributes:
        template: names, kinds, dtypes and sizes of the values that the engine plans, which are the
            same on most ranks. A message has a token instead (see :meth:`Exchange.share`).
        shards: offsets and sizes of this rank's shards of DTensors.
        torch_plan: torch's plan of all other items; None if there are none.
    """

    template: bytes | str
    shards: bytes
    torch_plan: SavePlan | None

    def to_send(self, ranks: Exchange) -> Contents:
        """Returns a copy with a token in place of the template."""
        assert isinstance(self.template, bytes)
        return dataclasses.replace(self, template=ranks.share(self.template))

    def received(self, ranks: Exchange) -> Contents:
        """Returns a copy with the template in place of its token, on the coordinator."""
        return dataclasses.replace(self, template=ranks.shared(self.template))


@dataclass
class Assignment:
    """The items that one rank writes.

    Attributes:
        rows: numbers of values in the template.
        torch_plan: the items that torch's planner assigns; None if there are none.
    """

    rows: Sequence[int]
    torch_plan: SavePlan | None


class GlobalPlan:
    """The plan for all ranks.

    Args:
        contents: the contents of each rank, indexed by rank.

    Raises:
        CheckpointError: the contents of several ranks contradict each other. The error gives names
            and ranks.
    """

    @no_gc()
    def __init__(self, contents: list[Contents]) -> None:
        self.contents = contents
        # Contents.received() has replaced all tokens by templates.
        texts = [(cast(bytes, of_rank.template), of_rank.shards) for of_rank in contents]
        try:
            self._engine = _core.GlobalPlan(texts)
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        self._torch_items: list[list[WriteItem]] = [[] for _ in contents]  # indexed by rank
        self._torch_metadata: dict[str, Any] = {}
        self._assignments = [Assignment(self._engine.owned(r), None) for r in range(len(contents))]
        if any(of_rank.torch_plan for of_rank in contents):
            plans = [of_rank.torch_plan or SavePlan([]) for of_rank in contents]
            planner = DefaultSavePlanner(flatten_state_dict=False)
            plans, metadata = planner.create_global_plan(plans)
            self._torch_metadata = metadata.state_dict_metadata
            self._torch_items = [list(plan.items) for plan in plans]
            for assignment, plan in zip(self._assignments, plans, strict=True):
                assignment.torch_plan = plan if plan.items else None

    def has_names_of(self, other: GlobalPlan) -> bool:
        """Returns True if another plan writes the same items on the same ranks."""
        return self is other or self._names() == other._names()

    def assignments(self) -> list[Assignment]:
        """Returns the assignments, indexed by rank."""
        return self._assignments

    def replicated_names(self) -> list[list[str]]:
        """Returns the names of the values of :meth:`SaveState.replicated`, indexed by rank: tensors
        first, then objects."""
        return [self._engine.replicated_names(rank) for rank in range(len(self.contents))]

    @functools.cached_property
    def paths(self) -> dict[str, tuple[Any, ...]]:
        """The path of each name in the nested state dict."""
        return self._engine.paths()

    @no_gc()
    def encode(self, written: list[Written], storage_meta: StorageMeta | None) -> bytes:
        """Returns the contents of ``.metadata``.

        Args:
            written: the results of the writes, indexed by rank.

        Raises:
            CheckpointError: ranks have different kinds of values under one name.
        """
        files = [of_rank.files for of_rank in written]
        meta = [] if storage_meta is None else [*vars(storage_meta).items()]
        texts = [(name, text) for name, text in meta if text is None or isinstance(text, str)]
        torch_index = self._torch_index(files)
        phases = json.dumps([of_rank.seconds for of_rank in written], separators=(",", ":"))
        return self._engine.encode(files, torch_index, texts, DCP_VERSION, phases)

    def describe(self) -> None:
        """Encodes the part of the metadata that depends only on the plan, once and without the GIL.

        Ignores errors: :meth:`encode` encodes this part again.
        """
        if not self._torch_metadata:
            with suppress(MemoryError):
                self._engine.describe()

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
        moved, changed, unchanged = self._engine.changes(files[0], files[1], counter)
        if moved is None:
            return None, {}
        for rank, items in enumerate(self._torch_items):
            crcs = [[place[3] for place in self._torch_places(of_all, rank)] for of_all in files]
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

    def _torch_index(self, files: list[_core.WrittenFiles]) -> _core.CheckpointIndex | None:
        """Returns the index of the items planned by torch; None if there are none."""
        if not self._torch_metadata:
            return None
        for name in self._torch_metadata:
            if self._engine.plans(name):
                raise CheckpointError(
                    f"{name}: ranks have different kinds of tensors or objects under this name"
                )
        storage = {
            item.index: _StorageInfo(*place[:3])
            for rank, items in enumerate(self._torch_items)
            for item, place in zip(items, self._torch_places(files, rank), strict=True)
        }
        return index_of(Metadata(self._torch_metadata, storage_data=storage), "torch's plan")

    def _names(self) -> list[tuple[Any, ...]]:
        """Returns each rank's template, shards and the items of torch's plan."""
        return [
            (of_rank.template, of_rank.shards, [item.index for item in items])
            for of_rank, items in zip(self.contents, self._torch_items, strict=True)
        ]

    def _torch_places(self, files: list[_core.WrittenFiles], rank: int) -> list[Place]:
        """Returns the locations of a rank's items planned by torch, which follow the engine's."""
        return files[rank].places(len(self._assignments[rank].rows))
