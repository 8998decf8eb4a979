"""A save through DCP that the engine plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner import SavePlanner as TorchsSavePlanner

from torch_ckpt.errors import CheckpointError
from torch_ckpt.saving.items import Written
from torch_ckpt.saving.plan import GlobalPlan, RankState, StateDict, Task, Told

# The global plan travels from the planner to the writer, on the coordinator, as this attribute of
# the metadata.
_PLAN = "torch_ckpt_plan"


class SavePlanner(TorchsSavePlanner):
    """The planner of ``torch_ckpt.save``, for ``dcp.save`` and ``dcp.async_save`` with a
    :class:`torch_ckpt.FileSystemWriter`, on all ranks.

    Plans and results are a few bytes a tensor. Metadata becomes torch's objects when somebody
    looks at it. All ranks save together: with ``use_collectives=False`` a rank alone does not have
    all shards of a DTensor, which is refused.

    Raises (from ``dcp.save``, on every rank, inside a ``CheckpointException``):
        CheckpointError: ranks have values that do not go together; by name and ranks. Or the writer
            is another one, or does not write local files by itself. Nothing has been saved.
    """

    def __init__(self) -> None:
        self._state: RankState | None = None

    def set_up_planner(
        self,
        state_dict: StateDict,
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self._state = RankState(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        assert self._state is not None
        return _plan_with(self._state.told())

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        for rank, plan in enumerate(all_plans):
            if not isinstance(plan.planner_data, Told):
                raise CheckpointError(
                    f"rank {rank} plans with another planner than torch_ckpt.SavePlanner; pass it "
                    "on all ranks"
                )
        plan_of_all = GlobalPlan([plan.planner_data for plan in all_plans])
        metadata = Metadata({})
        setattr(metadata, _PLAN, plan_of_all)
        return [_plan_with(task) for task in plan_of_all.tasks()], metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> NoReturn:
        raise CheckpointError(
            "torch_ckpt.SavePlanner plans for torch_ckpt.FileSystemWriter and local files without "
            "_extensions; use torch's DefaultSavePlanner with other writers"
        )

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
