"""The planner for saves through DCP that the engine plans."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from torch_ckpt import _C
from torch_ckpt.checkpoint.lazy_metadata import LazyMetadata
from torch_ckpt.errors import CheckpointError
from torch_ckpt.saving.global_plan import Assignment, Contents, GlobalPlan
from torch_ckpt.saving.save_state import SaveState, StateDict

# Name of the metadata's attribute in which the planner passes the global plan to the writer, on the
# coordinator.
_PLAN = "torch_ckpt_plan"


class EngineStorageMeta(StorageMeta):
    """Signals to a planner that the writer accepts the plans of :class:`SavePlanner`.

    Only planners see this class; the metadata has a plain ``StorageMeta``.
    """


class SavePlanner(DefaultSavePlanner):
    """Plans ``dcp.save`` and ``dcp.async_save`` in the same way as ``torch_ckpt.save``, with less
    work and smaller messages than torch's planner.

    Use this planner on all ranks, with a :class:`torch_ckpt.FileSystemWriter`. Ranks exchange only
    a few bytes per tensor. The metadata that DCP returns is converted to torch's objects on first
    access. All ranks must save together: with ``use_collectives=False``, a DTensor is refused,
    because a single rank does not have all shards of the DTensor.

    With a writer of another class, a remote file system or ``_extensions``, the planner works like
    torch's ``DefaultSavePlanner``.

    Raises (from ``dcp.save``, on every rank, inside a ``CheckpointException``):
        CheckpointError: the values of different ranks contradict each other (the message gives the
            names and ranks), or some ranks use a different planner or class of writer. Nothing was
            saved.

    Examples:
        ```python
        dcp.save(
            {"model": model.state_dict()},
            storage_writer=torch_ckpt.FileSystemWriter("checkpoints/100"),
            planner=torch_ckpt.SavePlanner(),
        )
        ```
    """

    def __init__(self) -> None:
        super().__init__()
        self._state: SaveState | None = None
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
            self._state = SaveState(state_dict)
            self._state.plan()
        else:
            super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        if not self._by_engine:
            return super().create_local_plan()
        assert self._state is not None
        return _plan_with(self._state.contents())

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        others = [
            rank
            for rank, plan in enumerate(all_plans)
            if not isinstance(plan.planner_data, Contents)
        ]
        if len(others) == len(all_plans):
            return super().create_global_plan(all_plans)
        if others:
            raise CheckpointError(
                f"rank {others[0]} does not plan with torch_ckpt.SavePlanner, or has another "
                "kind of writer; pass the same planner and writer on all ranks"
            )
        plan_of_all = GlobalPlan([plan.planner_data for plan in all_plans])
        metadata = LazyMetadata()
        setattr(metadata, _PLAN, plan_of_all)
        return [_plan_with(one) for one in plan_of_all.assignments], metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan if self._by_engine else super().finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> Any:
        if not self._by_engine:
            return super().resolve_data(write_item)
        raise CheckpointError(
            "torch_ckpt.SavePlanner planned for a torch_ckpt.FileSystemWriter, but another writer "
            "is writing; use torch's DefaultSavePlanner with that writer"
        )

    def has_planned(self) -> bool:
        """Returns True if the engine made the plan, and False if torch's planner made it."""
        return self._by_engine

    def take_sources(
        self, plan: SavePlan, with_names: bool
    ) -> tuple[_C.SaveSources, tuple[float, float], bytes]:
        """Returns the values assigned to this rank, :attr:`SaveState.seconds` and
        :meth:`SaveState.checksums`. Releases the state dict.

        Args:
            with_names: see :meth:`SaveState.sources`.

        Raises:
            CheckpointError: a value cannot be pickled.
        """
        state, self._state = self._state, None
        assert state is not None
        assignment = plan.planner_data
        assert isinstance(assignment, Assignment)
        checksums = state.checksums(assignment)
        return state.sources(assignment, with_names), state.seconds, checksums


def global_plan_of(metadata: Metadata) -> GlobalPlan | None:
    """Removes the plan of a :class:`SavePlanner` from the metadata and returns it; None with other
    planners."""
    found: GlobalPlan | None = vars(metadata).pop(_PLAN, None)
    return found


def _plan_with(planner_data: Contents | Assignment) -> SavePlan:
    # A writer that does not know this plan calls resolve_data for this item, which fails. An empty
    # plan would silently become an empty checkpoint.
    item = WriteItem(MetadataIndex("planned by torch_ckpt.SavePlanner"), WriteItemType.BYTE_IO)
    return SavePlan([item], planner_data=planner_data)
