"""The plans of the saves of one group of ranks.

csrc/planning/save_coordinator.h describes the messages.
"""

from __future__ import annotations

from typing import ClassVar
from weakref import WeakKeyDictionary

from torch.distributed.checkpoint.metadata import StorageMeta

from torch_ckpt import _core
from torch_ckpt._base.life_cycle import Part, register
from torch_ckpt.checkpoint.metadata import DCP_VERSION
from torch_ckpt.ranks.group import RankGroup
from torch_ckpt.saving.write import Written


class AgreedPlan:
    """The plan on which the ranks of a group agreed last. Every rank has one for all saves.

    Attributes:
        own: this rank's part.
        coordinator: the parts of all ranks; used on the coordinator only.
    """

    _of: ClassVar[WeakKeyDictionary[RankGroup, AgreedPlan]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self.own = _core.RankPlan()
        self.coordinator = _core.SaveCoordinator()

    @classmethod
    def of(cls, group: RankGroup) -> AgreedPlan:
        """Returns the plan of a group of ranks."""
        found = cls._of.get(group)
        return cls._of.setdefault(group, cls()) if found is None else found

    @classmethod
    def forget_in_child(cls) -> None:
        """Forgets all plans in a forked child, which plans independently."""
        cls._of.clear()

    def encode(
        self, written: list[Written], storage_meta: StorageMeta | None
    ) -> _core.EncodedMetadata:
        """Returns the contents of ``.metadata``.

        Args:
            written: the results of the writes, indexed by rank.
        """
        meta = [] if storage_meta is None else [*vars(storage_meta).items()]
        texts = [(name, text) for name, text in meta if text is None or isinstance(text, str)]
        files = [of_rank.files for of_rank in written]
        return self.coordinator.encode(files, texts, DCP_VERSION)


register(Part.PLANS, in_child=AgreedPlan.forget_in_child)
