"""Planning and finalizing a save whose writing is somebody else's; in Megatron's shape.

Both are collective: every rank makes the same calls. The ranks meet in the store of the process
group (ranks/meeting.py), not in the group, which may be that of a device; and nobody who has failed
is waited for:

1. *Plan.* Every rank plans what it has. The coordinator makes the metadata of it, and the global
   plan where ranks cannot name their files themselves. A failure up to here raises on all ranks.
2. A plan that is known to be the same is not exchanged: this is where a save needs no meeting.
   What fails on a rank from here on fails the save at its end, on all ranks.
3. *Finalize.* Every rank's results, or failure, go to the coordinator, which commits.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from torch_ckpt import _core
from torch_ckpt._base.cycle_collector import no_gc
from torch_ckpt._base.planner_hooks import keeps_methods
from torch_ckpt.checkpoint.lease import remove_own
from torch_ckpt.errors import CheckpointError
from torch_ckpt.megatron.structures import (
    digest_of,
    kept_structures,
    named_plan,
    require_same,
    same_plans,
)
from torch_ckpt.megatron.writer import FileSystemWriterAsync
from torch_ckpt.ranks.failures import raised_as_ours
from torch_ckpt.ranks.meeting import TIMEOUT_SECONDS, Meeting, Ranks, is_distributed
from torch_ckpt.ranks.outcomes import attempt, failed
from torch_ckpt.saving.running_saves import spawn
from torch_ckpt.saving.structure import Structure, structure_of

T = TypeVar("T")
R = TypeVar("R")

#: What ``save_state_dict_async_finalize`` takes.
Finalizing = tuple[FileSystemWriterAsync, Metadata | None, _DistWrapper]

#: Of an earlier save: its central plan, its local plan, and whether two saves had the same.
CachedStructure = tuple[SavePlan | None, SavePlan | None, bool]


class Planned(NamedTuple):
    """What a plan has come to; see :func:`save_state_dict_async_plan`. Sites unpack it."""

    finalizing: Finalizing
    central_plan: SavePlan
    local_plan: SavePlan
    is_as_cached: bool
    is_as_loaded: bool


def save_state_dict_async_plan(
    state_dict: dict[str, Any],
    storage_writer: FileSystemWriterAsync,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    planner: SavePlanner | None = None,
    cached_ckpt_structure: CachedStructure | None = None,
    loaded_all_plans: list[SavePlan] | None = None,
) -> Planned:
    """Plans a save and gives the writer the values to write; every rank calls it.

    Args:
        state_dict: what to save. Values are found here, and copied when the writer's preload
            function is called; until then they may not change.
        storage_writer: of this save.
        process_group: the ranks; the default group if None.
        coordinator_rank: in the group; makes and commits the metadata.
        planner: torch's ``DefaultSavePlanner`` if None. Where it and the writer can run a
            decentralized global plan, ranks name their files themselves.
        cached_ckpt_structure: central plan, local plan, and whether those of all ranks are known to
            stay the same: then nothing is exchanged. Each rank still compares its state dict with
            its plan; one that has changed fails the save, since others rely on the plan.
        loaded_all_plans: of all ranks, as a loaded checkpoint's metadata has them. Where every
            rank's plan is that one, the loaded metadata may be used again.

    Returns:
        What :func:`save_state_dict_async_finalize` takes (its metadata is None where that of an
        earlier save is to be used again, and on ranks that are not the coordinator); central plan
        and local plan, to be passed with the next save; whether the central plan is the one that
        was passed; whether all plans are those of ``loaded_all_plans``.

    Raises:
        CheckpointException: on every rank, with the cause of each rank that failed.
    """
    wrapper = _DistWrapper(process_group, is_distributed(), coordinator_rank)
    planner = planner or DefaultSavePlanner()
    central_cached, local_cached, is_valid = cached_ckpt_structure or (None, None, False)
    meetings = _Meetings(wrapper, _timeout_of(storage_writer))
    # It travels with the wrapper, which finalizing gets.
    wrapper.torch_ckpt_meetings = meetings  # type: ignore[attr-defined]
    save = _Save(state_dict, storage_writer, wrapper, planner)
    if is_valid and central_cached is not None and local_cached is not None:
        # No meeting: from here on the others rely on this rank.
        agreed = _Agreed(central_cached, local_cached, as_cached=True, as_loaded=False)
        problem = save.compare(local_cached)
    else:
        try:
            agreed = save.agree(meetings, loaded_all_plans or [], local_cached)
        except BaseException:
            _abandon(storage_writer)
            raise
        finally:
            meetings.close()
        problem = None
        save.remember(agreed.local)
    central = save.hand_over(agreed.central, problem)
    finalizing = storage_writer, save.metadata, wrapper
    return Planned(finalizing, central, agreed.local, agreed.as_cached, agreed.as_loaded)


def save_state_dict_async_finalize(
    storage_writer: FileSystemWriterAsync,
    global_metadata: Metadata | None,
    dist_wrapper: _DistWrapper,
) -> None:
    """Takes the results of all ranks' save functions and commits; every rank calls it.

    Args:
        storage_writer, global_metadata, dist_wrapper: as the plan has returned them. The metadata
            is the coordinator's alone.

    Raises:
        CheckpointException: on every rank, with the cause of each rank that failed; nothing was
            committed then, unless a cause says so (``DurabilityUncertain``).
    """

    def mine() -> list[WriteResult]:
        results = storage_writer.retrieve_write_results()
        if failed(results):
            error: BaseException = results[0]  # type: ignore[assignment]
            raise error
        return results  # type: ignore[return-value]

    def commit(results: list[list[WriteResult]]) -> None:
        if global_metadata is None:
            raise CheckpointError(
                "the coordinator has no metadata: where the plan returned None, that of the save "
                "whose plan is used again must be passed"
            )
        storage_writer.finish(global_metadata, results)

    def undo(results: list[WriteResult]) -> None:
        if isinstance(storage_writer, FileSystemWriterAsync) and not storage_writer.use_msc:
            files = {result.storage_data.relative_path for result in results}
            remove_own(storage_writer.directory, files)

    try:
        # That of the plan, where ours has planned: it knows the ranks, whatever has become of the
        # process group since.
        planned: _Meetings | None = getattr(dist_wrapper, "torch_ckpt_meetings", None)
        timeout = _timeout_of(storage_writer)
        meetings = planned.end() if planned is not None else _Meetings(dist_wrapper, timeout)
    except BaseException:
        _abandon(storage_writer)
        raise
    try:
        meetings.all_reduce("write", mine, commit, undo)
    except BaseException:
        # The coordinator after the others: of two at a time neither is alone in the directory, and
        # nothing would be removed.
        if not dist_wrapper.is_coordinator:
            _abandon(storage_writer)
        meetings.close(wait=True)
        _abandon(storage_writer)
        raise
    _abandon(storage_writer)
    meetings.close()


class _Agreed(NamedTuple):
    """The plans of one rank, and whether those of all ranks are known ones."""

    central: SavePlan
    local: SavePlan
    as_cached: bool
    as_loaded: bool


class _Posted(NamedTuple):
    """What a rank tells of its local plan."""

    plan: SavePlan | None  # None: it is the loaded one
    is_as_cached: bool
    digest: int = 0  # of the loaded one


class _Answer(NamedTuple):
    """What the coordinator answers."""

    central: SavePlan | None  # None: ranks make it themselves
    tag: str
    as_cached: bool
    as_loaded: bool = False
    in_full: bool = False  # post it again, and not that it is the loaded one


class _Save:
    """One rank's part in one plan."""

    def __init__(
        self,
        state_dict: dict[str, Any],
        writer: FileSystemWriterAsync,
        wrapper: _DistWrapper,
        planner: SavePlanner,
    ) -> None:
        self.metadata: Metadata | None = None
        self._state_dict = state_dict
        self._writer = writer
        self._wrapper = wrapper
        self._planner = planner
        self._is_decentralized = all(
            getattr(one, "can_run_decentralized_global_plan", False) for one in (planner, writer)
        )

    @no_gc()
    def compare(self, cached: SavePlan) -> Exception | None:
        """Sets up the save; why the cached local plan cannot be used again."""
        try:
            self._set_up()
            # First: also where this fails, the coordinator removes what the others write.
            self._writer.prepare_local_plan(cached)
            known = kept_structures.of(cached)
            if known is None or known != self._structure():
                require_same(self._final(self._planner.create_local_plan()), cached)
        except Exception as error:
            return error
        return None

    def agree(
        self, meetings: _Meetings, loaded: list[SavePlan], cached: SavePlan | None
    ) -> _Agreed:
        """Plans with the other ranks.

        Args:
            meetings: of this save.
            loaded: the plans of all ranks in a loaded checkpoint.
            cached: this rank's local plan in the save before.
        """
        rank, size = self._wrapper.get_rank(), self._wrapper.get_world_size()
        local: list[SavePlan] = []

        own: list[SavePlan] = []

        def plan_locally() -> _Posted:
            self._set_up()
            with no_gc():
                local.append(self._writer.prepare_local_plan(self._planner.create_local_plan()))
            if not self._is_decentralized:
                return _Posted(local[0], cached is not None and same_plans(local[0], cached))
            own.append(self._final(local[0]))
            as_cached = cached is not None and same_plans(own[0], cached)
            if len(loaded) == size and same_plans(local[0], loaded[rank]):
                return _Posted(None, as_cached, digest_of(loaded[rank]))
            return _Posted(local[0], as_cached)

        def is_known(rank: int, posted: _Posted) -> bool:
            """Whether the coordinator has the plan that the rank says it has loaded."""
            if posted.plan is not None:
                return True
            return len(loaded) == size and digest_of(loaded[rank]) == posted.digest

        def plan_globally(posted: list[_Posted]) -> list[_Answer]:
            _core.fault_point("plan of all ranks")
            tag: str = getattr(self._writer, "tag", "")
            answer = _Answer(None, tag, all(one.is_as_cached for one in posted))
            if not all(map(is_known, range(size), posted)):
                return [answer._replace(in_full=True)] * size
            if all(one.plan is None for one in posted):
                return [answer._replace(as_loaded=True)] * size
            plans = [loaded[r] if one.plan is None else one.plan for r, one in enumerate(posted)]
            central, self.metadata = self._planner.create_global_plan(plans)
            if self._is_decentralized:
                # A restart compares its plans with these.
                self.metadata.all_local_plans = plans  # type: ignore[attr-defined]
                return [answer] * size
            central = self._writer.prepare_global_plan(central)
            # Without the tag, which is this save's: the plan may be used again.
            return [answer._replace(central=named_plan(plan, r)) for r, plan in enumerate(central)]

        answer = meetings.reduce_scatter("plan", plan_locally, plan_globally)
        if answer.in_full:
            in_full = _Posted(local[0], answer.as_cached)
            answer = meetings.reduce_scatter("plan", lambda: in_full, plan_globally)
        if isinstance(self._writer, FileSystemWriterAsync):
            self._writer.use_tag(answer.tag)
        if answer.central is not None:
            return _Agreed(answer.central, local[0], answer.as_cached, False)
        return _Agreed(own[0], own[0], answer.as_cached, answer.as_loaded)

    def remember(self, local: SavePlan) -> None:
        """Keeps what the plan depends on, for a save that uses it again."""
        structure = attempt(self._structure)
        if structure is not None and not failed(structure):
            kept_structures.keep(local, structure)

    def hand_over(self, central: SavePlan, problem: Exception | None) -> SavePlan:
        """Gives the writer its values; what fails is the writer's to tell."""
        try:
            if problem is not None:
                raise problem
            central = self._planner.finish_plan(central)
            self._writer.prepare_write_data(central, self._planner)
        except Exception as error:
            if not isinstance(self._writer, FileSystemWriterAsync):
                raise
            self._writer.fail(error)
        return central

    # --- private ---------------------------------------------------------------------------------

    def _set_up(self) -> None:
        # By name: torch 2.4 put another argument before it.
        self._planner.set_up_planner(self._state_dict, is_coordinator=self._wrapper.is_coordinator)
        self._writer.set_up_storage_writer(self._wrapper.is_coordinator)

    def _final(self, local: SavePlan) -> SavePlan:
        """What becomes of a local plan without the others, where that can be."""
        if not self._is_decentralized:
            return local
        central = self._planner.create_decentralized_global_plan(local)  # type: ignore[attr-defined]
        return self._writer.prepare_decentralized_global_plan(central)

    def _structure(self) -> Structure | None:
        """Of what torch's planner plans; None where somebody else does."""
        if not keeps_methods(self._planner, DefaultSavePlanner, ("set_up_planner",)):
            return None
        assert isinstance(self._planner, DefaultSavePlanner)
        known = structure_of(self._planner.state_dict)
        # How the names are nested goes into the metadata, too.
        mappings = getattr(self._planner, "mappings", {})
        return None if known is None else [*known, ("", dict(mappings))]


class _Meetings:
    """The ranks of a torch wrapper, over the store; over its process group where its coordinator is
    not the first rank.

    Args:
        timeout: in seconds, for a rank that gives no sign of life.

    Raises:
        CheckpointError: the wrapper's process group is gone.
    """

    def __init__(self, wrapper: _DistWrapper, timeout: float) -> None:
        if wrapper.use_dist and not is_distributed():
            raise CheckpointError(
                "the process group of this save is gone, so it cannot be finalized; finalize, or "
                "close the queue, before destroy_process_group()"
            )
        self._wrapper = wrapper
        self._timeout = timeout
        self._meeting: Meeting | None = None
        self._ranks: Ranks | None = None
        self._prefix: str | None = None
        if wrapper.coordinator_rank == 0:
            self._meeting = Meeting.of(wrapper.group, no_dist=not wrapper.use_dist)
            if self._meeting.distributed:
                self._prefix = self._meeting.next_prefix("plan")
            self._ranks = self._meeting.ranks(timeout, prefix=self._prefix)

    def end(self) -> _Meetings:
        """For the end of the save whose plan this was.

        By its number: a rank may fail and not come to finalize, which must not make it miss the
        others in the saves to come.
        """
        meetings = copy.copy(self)
        if self._meeting is not None:
            meetings._ranks = self._meeting.ranks(self._timeout, prefix=f"{self._prefix}/end")
        return meetings

    def reduce_scatter(
        self, step: str, local: Callable[[], T], combine: Callable[[list[T]], list[R]]
    ) -> R:
        if self._ranks is None:
            with raised_as_ours(self._wrapper.get_rank()):
                return self._wrapper.reduce_scatter(step, local, combine)
        # However long it takes: a process that lives is waited for.
        with self._ranks.alive(time.monotonic_ns):
            return self._ranks.reduce_scatter(step, local, combine)

    def all_reduce(
        self,
        step: str,
        local: Callable[[], T],
        combine: Callable[[list[T]], R],
        undo: Callable[[T], None],
    ) -> R:
        if self._ranks is None:
            with raised_as_ours(self._wrapper.get_rank()):
                return self._wrapper.all_reduce(step, local, combine)
        with self._ranks.alive(time.monotonic_ns):
            return self._ranks.all_reduce(step, local, combine, undo)

    def close(self, wait: bool = False) -> None:
        """Ends it; the coordinator waits for the others to have come here, and training need not.

        Args:
            wait: until they have.
        """
        if self._ranks is None or not self._ranks.distributed:
            return
        try:
            thread = spawn(self._ranks.close)
        except RuntimeError:
            # No thread could be started.
            self._ranks.close()
        else:
            if wait:
                thread.join()


def _timeout_of(writer: Any) -> float:
    return writer.timeout if isinstance(writer, FileSystemWriterAsync) else TIMEOUT_SECONDS


def _abandon(writer: Any) -> None:
    if isinstance(writer, FileSystemWriterAsync):
        writer.abandon()
