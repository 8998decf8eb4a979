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
from torch.distributed.checkpoint.planner import SavePlan

from torch_ckpt import _core
from torch_ckpt._base.cycle_collector import no_gc
from torch_ckpt.checkpoint.metadata import DCP_VERSION, index_of
from torch_ckpt.errors import CheckpointError
from torch_ckpt.ranks.meeting import Ranks
from torch_ckpt.saving.items import Written

StateDict = dict[str, Any]

#: (file name, offset, length, payload CRC-32) of one stored item, in bytes.
Place = tuple[str, int, int, int]


@dataclass
class Contents:
    """The part of one rank's state that a plan depends on.

    Attributes:
        template: names, kinds, dtypes and sizes of the values that the engine plans; identical on
            most ranks. In a message, its token (see :meth:`Ranks.share`).
        shards: offsets and sizes of this rank's shards of DTensors.
        rest: the plan of all other items, by torch's planner.
    """

    template: bytes | str
    shards: bytes
    rest: SavePlan

    def to_send(self, ranks: Ranks) -> Contents:
        """Returns a copy with a token in place of the template."""
        assert isinstance(self.template, bytes)
        return dataclasses.replace(self, template=ranks.share(self.template))

    def received(self, ranks: Ranks) -> Contents:
        """Returns a copy with the template in place of its token, on the coordinator."""
        return dataclasses.replace(self, template=ranks.shared(self.template))


@dataclass
class Assignment:
    """The items that one rank writes.

    Attributes:
        rows: numbers of values in the template.
        rest: items of torch's plan.
    """

    rows: Sequence[int]
    rest: SavePlan


class GlobalPlan:
    """The plan for all ranks.

    Args:
        contents: contents of each rank, by rank.

    Raises:
        CheckpointError: contents of several ranks contradict each other; names and ranks are given.
    """

    @no_gc()
    def __init__(self, contents: list[Contents]) -> None:
        self.contents = contents
        # received() has been called for all of them.
        texts = [(cast(bytes, of_rank.template), of_rank.shards) for of_rank in contents]
        try:
            self._engine = _core.GlobalPlan(texts)
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        planner = DefaultSavePlanner(flatten_state_dict=False)
        rest, self._rest_metadata = planner.create_global_plan([c.rest for c in contents])
        self._rest = list(rest)  # by rank

    def has_names_of(self, other: GlobalPlan) -> bool:
        """Returns True if another plan writes the same items on the same ranks."""
        return self is other or self._names() == other._names()

    def assignments(self) -> list[Assignment]:
        """Returns the assignments, by rank."""
        return [Assignment(self._engine.owned(rank), rest) for rank, rest in enumerate(self._rest)]

    def replicated_names(self) -> list[list[str]]:
        """Returns the names of the values of :meth:`SaveState.replicated`, by rank: tensors, then
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
            (of_rank.template, of_rank.shards, [item.index for item in rest.items])
            for of_rank, rest in zip(self.contents, self._rest, strict=True)
        ]

    def _of_rest(self, files: list[_core.WrittenFiles], rank: int) -> list[Place]:
        """Returns the locations of a rank's items of torch's plan, which come after all others."""
        return files[rank].places(len(self._engine.owned(rank)))
