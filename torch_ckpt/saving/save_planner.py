"""A save through DCP that the engine plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from torch_ckpt.errors import CheckpointError
from torch_ckpt.saving.items import Written
from torch_ckpt.saving.plan import GlobalPlan, RankState, StateDict, Task, Told

# The global plan travels from the planner to the writer, on the coordinator, as this attribute of
# the metadata.
_PLAN = "torch_ckpt_plan"


class EngineStorageMeta(StorageMeta):
    """Tells a planner that the writer's engine writes what :class:`SavePlanner` plans.

    It is only passed to planners; metadata has a plain ``StorageMeta``.
    """


class SavePlanner(DefaultSavePlanner):
    """The planner of ``torch_ckpt.save``, for ``dcp.save`` and ``dcp.async_save`` with a
    :class:`torch_ckpt.FileSystemWriter`, on all ranks.

    Plans and results are a few bytes a tensor. Metadata becomes torch's objects when somebody
    looks at it. All ranks save together: with ``use_collectives=False`` a rank alone does not have
    all shards of a DTensor, which is refused.

    It plans as torch's ``DefaultSavePlanner`` if the writer is of another class, writes to a remote
    file system or has ``_extensions``.

    Raises (from ``dcp.save``, on every rank, inside a ``CheckpointException``):
        CheckpointError: values of the ranks do not fit together, with their names and ranks; or
            some ranks have another planner, or another kind of writer. Nothing has been saved.
    """

    def __init__(self) -> None:
        super().__init__()
        self._state: RankState | None = None
        self._by_engine = False

    def set_up_planner(
        self,
        state_dict: StateDict,
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self._state = None
        self._by_engine = isinstance(storage_meta, EngineStorageMeta)
        if self._by_engine:
            self._state = RankState(state_dict, storage_meta, is_coordinator)
        else:
            super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        if not self._by_engine:
            return super().create_local_plan()
        assert self._state is not None
        return _plan_with(self._state.told())

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        others = [
            rank for rank, plan in enumerate(all_plans) if not isinstance(plan.planner_data, Told)
        ]
        if len(others) == len(all_plans):
            return super().create_global_plan(all_plans)
        if others:
            raise CheckpointError(
                f"rank {others[0]} plans with another planner than torch_ckpt.SavePlanner, or for "
                "another kind of writer; pass the same planner and writer on all ranks"
            )
        plan_of_all = GlobalPlan([plan.planner_data for plan in all_plans])
        metadata = Metadata({})
        setattr(metadata, _PLAN, plan_of_all)
        return [_plan_with(task) for task in plan_of_all.tasks()], metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan if self._by_engine else super().finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> Any:
        if not self._by_engine:
            return super().resolve_data(write_item)
        raise CheckpointError(
            "torch_ckpt.SavePlanner has planned for a torch_ckpt.FileSystemWriter, and another "
            "writer writes; use torch's DefaultSavePlanner with it"
        )

    def has_planned(self) -> bool:
        """Return True if the engine has planned, and False if torch's planner has."""
        return self._by_engine

    def write(self, plan: SavePlan, write: Callable[[list[str], list[Any]], Written]) -> Written:
        """Has this rank's part written. Lets go of the state dict.

        Args:
            write: gets the names and values of what this rank writes.

        Raises:
            CheckpointError: a value cannot be pickled.
        """
        state, self._state = self._state, None
        assert state is not None
        task = plan.planner_data
        assert isinstance(task, Task)
        return state.add_seconds(write(*state.values(task)))


def global_plan_of(metadata: Metadata) -> GlobalPlan | None:
    """What a :class:`SavePlanner` has planned; None where another planner has."""
    found: GlobalPlan | None = vars(metadata).pop(_PLAN, None)
    return found


def _plan_with(planner_data: Told | Task) -> SavePlan:
    # An item of which a writer that does not know this plan must ask resolve_data: an empty plan
    # would be an empty checkpoint, without a word.
    item = WriteItem(MetadataIndex("planned by torch_ckpt.SavePlanner"), WriteItemType.BYTE_IO)
    return SavePlan([item], planner_data=planner_data)
