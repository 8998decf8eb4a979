"""The plan for all ranks of a save, on the coordinator.

1. Every rank sends its :class:`Contents` (saving/save_state.py): a template of its values and its
   parts of sharded tensors (csrc/planning/state_template.h).
2. The coordinator builds a :class:`GlobalPlan` from these. It assigns the values that several ranks
   have to one of them.
3. Each rank gets its :class:`Assignment`.
4. :meth:`GlobalPlan.encode` builds the metadata from the plan and the results of the writes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, cast

from torch.distributed.checkpoint.metadata import StorageMeta

from torch_ckpt import _core
from torch_ckpt._base.cycle_collector import no_gc
from torch_ckpt.checkpoint.metadata import DCP_VERSION
from torch_ckpt.errors import CheckpointError
from torch_ckpt.saving.copies import text_of_copies
from torch_ckpt.saving.items import Written

StateDict = dict[str, Any]


@dataclass
class Contents:
    """The inputs of a plan from one rank.

    Attributes:
        template: names, kinds, dtypes and sizes of the values, which are the same on most ranks.
            During its transfer, a token (see :meth:`Exchange.share`).
        shards: offsets and sizes of this rank's parts of sharded tensors.
    """

    template: bytes | str
    shards: bytes


@dataclass
class Assignment:
    """The items that one rank writes.

    Attributes:
        numbers: encoded numbers of the items; see ``FlatState.sources``.
        copies: encoded numbers of items whose checksums the rank must send; see
            :meth:`GlobalPlan.require_equal_copies`. Set if there are any.
    """

    # Most plans have no copies. Then the attribute is not in the message to the rank.
    numbers: bytes
    copies: bytes = field(default=b"", init=False)


class GlobalPlan:
    """The plan for all ranks.

    Args:
        contents: the contents of each rank, indexed by rank.

    Attributes:
        engine: the engine's plan.
        assignments: the assignments, indexed by rank.

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
        self.assignments = [
            Assignment(self.engine.assignment(rank)) for rank in range(len(contents))
        ]
        for rank, assignment in enumerate(self.assignments):
            if copies := self.engine.copies(rank):
                assignment.copies = copies

    def writes_same_items(self, other: GlobalPlan) -> bool:
        """Returns True if another plan writes the same items on the same ranks."""
        return self is other or self.contents == other.contents

    def require_equal_copies(self, written: list[Written]) -> None:
        """Compares the copies of sharded tensors (saving/copies.py), before the commit.

        Args:
            written: the results of the writes, indexed by rank.

        Raises:
            CheckpointError: copies differ. The error gives names, ranks and meshes.
        """
        if not any(one.copies for one in self.assignments):
            return
        differing = self.engine.differing_copies([of_rank.checksums for of_rank in written])
        if differing:
            raise CheckpointError(text_of_copies(differing))

    @no_gc()
    def encode(
        self, written: list[Written], storage_meta: StorageMeta | None
    ) -> _core.EncodedMetadata:
        """Returns the contents of ``.metadata``.

        Args:
            written: the results of the writes, indexed by rank.
        """
        files = [of_rank.files for of_rank in written]
        meta = [] if storage_meta is None else [*vars(storage_meta).items()]
        texts = [(name, text) for name, text in meta if text is None or isinstance(text, str)]
        seconds = [[round(phase, 4) for phase in of_rank.seconds] for of_rank in written]
        phases = json.dumps(seconds, separators=(",", ":"))
        return self.engine.encode(files, texts, DCP_VERSION, phases)

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
        return self.engine.changes(files[0], files[1], counter)
