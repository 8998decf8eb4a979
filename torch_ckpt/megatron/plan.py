"""Plans and finalizes a save that is written elsewhere, with Megatron's signatures.

All ranks must make the same calls. They exchange messages through the process group's store, not
through its collectives, which may need a device. No rank waits for a rank that has failed.

1. *Plan.* Every rank creates its local plan. The coordinator creates the metadata and, if the ranks
   cannot name their own files, the global plan. A failure is raised on all ranks.
2. If a cached plan is valid on all ranks, nothing is exchanged. If a rank fails later, the save
   fails on all ranks when it is finalized.
3. *Finalize.* Every rank sends its results or its failure to the coordinator, which commits.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from torch_ckpt import _core
from torch_ckpt._base.cycle_collector import no_gc
from torch_ckpt._base.planner_hooks import keeps_methods
from torch_ckpt.errors import CheckpointError
from torch_ckpt.megatron.async_writer import (
    FileSystemWriterAsync,
    require_same,
    same_plans,
    with_file_prefix,
)
from torch_ckpt.ranks.exchange import Answers, Exchange
from torch_ckpt.ranks.group import RankGroup, is_distributed
from torch_ckpt.saving.save_state import SaveState

P = ParamSpec("P")
R = TypeVar("R")

#: The functions that ``install`` has replaced: by the module of the writer class, and by name.
originals: dict[str, dict[str, Callable[..., Any]]] = {}


def for_our_writers(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function that has a storage writer among its arguments.

    If the writer is one of a replaced package, the original function is called. Any other writer of
    another class raises TypeError.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for writer in (*args, *kwargs.values()):
            if isinstance(writer, StorageWriter) and not isinstance(writer, FileSystemWriterAsync):
                modules = [kind.__module__ for kind in type(writer).__mro__]
                known = [originals[module] for module in modules if module in originals]
                if not known or function.__name__ not in known[0]:
                    raise TypeError(
                        f"{function.__name__}() cannot save through a {type(writer).__name__}; "
                        "pass a FileSystemWriterAsync of torch_ckpt.megatron or torch_ckpt.nvrx"
                    )
                result: R = known[0][function.__name__](*args, **kwargs)
                return result
        return function(*args, **kwargs)

    return call


#: The arguments of ``save_state_dict_async_finalize``.
Finalizing = tuple[FileSystemWriterAsync, Metadata | None, _DistWrapper]

#: Central and local plan of an earlier save, and True if all ranks had the same plans twice.
CachedStructure = tuple[SavePlan | None, SavePlan | None, bool]


class PlannedSave(NamedTuple):
    """Result of :func:`save_state_dict_async_plan`, in the form that Megatron unpacks."""

    finalizing: Finalizing
    central_plan: SavePlan
    local_plan: SavePlan
    is_as_cached: bool
    is_as_loaded: bool


@for_our_writers
def save_state_dict_async_plan(
    state_dict: dict[str, Any],
    storage_writer: FileSystemWriterAsync,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    planner: SavePlanner | None = None,
    cached_ckpt_structure: CachedStructure | None = None,
    loaded_all_plans: list[SavePlan] | None = None,
) -> PlannedSave:
    """Plans a save and passes the values to the writer. All ranks must call this function.

    Args:
        state_dict: the values to save. This function looks up the values, and the writer's preload
            function copies them. Do not modify the values between the two calls.
        storage_writer: the writer of this save.
        process_group: the ranks; None means the default group.
        coordinator_rank: must be 0: the first rank of the group creates and commits the metadata.
        planner: the planner; None means torch's ``DefaultSavePlanner``. If planner and writer both
            support a decentralized global plan, each rank names its own files.
        cached_ckpt_structure: a tuple: the central plan of the previous save, the local plan of
            that save, and a flag. The flag is True if no rank's plan changed between two
            consecutive saves; in that case, the ranks exchange nothing. Each rank still compares
            its state dict with its plan. If a rank's state dict has changed, the save fails on all
            ranks.
        loaded_all_plans: plans of all ranks from the metadata of a loaded checkpoint. If these
            plans equal the plans of this save, the loaded metadata can be committed again.

    Returns:
        Five values: a tuple of the arguments of :func:`save_state_dict_async_finalize`; the central
        plan and the local plan, to pass to the next save; True if the plans of all ranks equal the
        plans in ``cached_ckpt_structure``; True if the plans of all ranks equal the plans in
        ``loaded_all_plans``. The metadata in the first value is None on ranks other than the
        coordinator. On the coordinator, the metadata is None if the metadata of an earlier save
        must be used.

    Raises:
        CheckpointException: planning failed; raised on every rank with the cause from each failed
            rank.
        ValueError: ``coordinator_rank`` is not 0.

    Examples:
        ```python
        writer = torch_ckpt.megatron.FileSystemWriterAsync("checkpoints/100", thread_count=2)
        finalizing, *plans = torch_ckpt.megatron.save_state_dict_async_plan(state, writer)
        save_fn, preload_fn, args = writer.get_save_function_and_args()
        ```
    """
    wrapper = _DistWrapper(process_group, is_distributed(), coordinator_rank)
    central_cached, local_cached, is_valid = cached_ckpt_structure or (None, None, False)
    # save_state_dict_async_finalize receives the wrapper, and with it the ranks.
    open_exchange = _opener_for(wrapper, storage_writer)
    wrapper.torch_ckpt_opener = open_exchange  # type: ignore[attr-defined]
    save = _Save(state_dict, storage_writer, wrapper, planner or DefaultSavePlanner())
    if is_valid and central_cached is not None and local_cached is not None:
        # Without an exchange, do not raise an error here, because the other ranks continue.
        problem = save.reuse(central_cached, local_cached)
    else:
        ranks = open_exchange("")
        try:
            # Planning may take a long time, so send heartbeats as long as the process runs.
            with ranks.alive(time.monotonic_ns):
                save.agree(ranks, loaded_all_plans or [], local_cached)
        except BaseException:
            storage_writer.abandon()
            raise
        finally:
            ranks.close_in_background()
        problem = None
        save.remember_structure()
    central = save.prepare_write(problem)
    finalizing = storage_writer, save.metadata, wrapper
    return PlannedSave(finalizing, central, save.local, save.is_as_cached, save.is_as_loaded)


@for_our_writers
def save_state_dict_async_finalize(
    storage_writer: FileSystemWriterAsync,
    global_metadata: Metadata | None,
    dist_wrapper: _DistWrapper,
) -> None:
    """Collects all results and commits the checkpoint. All ranks must call this function.

    Args:
        storage_writer: the writer that :func:`save_state_dict_async_plan` returned.
        global_metadata: the metadata that :func:`save_state_dict_async_plan` returned; used only on
            the coordinator.
        dist_wrapper: the wrapper that :func:`save_state_dict_async_plan` returned.

    Raises:
        CheckpointException: the save failed; raised on every rank with the cause from each failed
            rank. Nothing was committed, unless a cause is a ``DurabilityUncertain``.

    Examples:
        ```python
        finalizing, *_ = torch_ckpt.megatron.save_state_dict_async_plan(state, writer)
        save_fn, preload_fn, args = writer.get_save_function_and_args()
        finalize_fns = [lambda: torch_ckpt.megatron.save_state_dict_async_finalize(*finalizing)]
        ```
    """

    def retrieve() -> tuple[list[WriteResult], list[WriteResult]]:
        results = storage_writer.retrieve_write_results()
        if isinstance(results, tuple) and isinstance(results[0], BaseException):
            raise results[0]
        return results, results

    def commit(results: list[list[WriteResult]]) -> None:
        if global_metadata is None:
            raise CheckpointError(
                f"rank {dist_wrapper.get_rank()}, the coordinator, has no metadata to commit; if "
                "the plan returned None, pass the metadata of the save whose plan is reused"
            )
        storage_writer.finish(global_metadata, results)

    try:
        # If our function planned the save, use its store: the process group may have been
        # destroyed since.
        open_exchange = getattr(dist_wrapper, "torch_ckpt_opener", None)
        ranks = (open_exchange or _opener_for(dist_wrapper, storage_writer))("/end")
        try:
            with ranks.alive(time.monotonic_ns):
                ranks.exchange("write", retrieve, commit, storage_writer.remove_written)
        except BaseException:
            # The coordinator abandons last. Files are deleted by the last rank that holds the
            # directory's lock; if two ranks abandoned at once, neither would be the last.
            if not dist_wrapper.is_coordinator:
                storage_writer.abandon()
            ranks.close()
            raise
    finally:
        storage_writer.abandon()
    ranks.close_in_background()


#: Structures of the state dicts that plans were made from, as long as the plans exist. By the id of
#: the plan, because plans are compared by value and have no hash.
_structures: dict[int, Any] = {}


class _PlanMessage(NamedTuple):
    """The local plan of a rank, as it is sent to the coordinator."""

    plan: SavePlan
    is_as_cached: bool
    is_as_loaded: bool


class _PlanAnswer(NamedTuple):
    """The coordinator's answer to a rank."""

    central: SavePlan | None  # None: the rank derives it from its local plan
    tag: str
    is_as_cached: bool
    is_as_loaded: bool


class _Save:
    """One rank's part in planning a save.

    Attributes:
        central: this rank's central plan.
        local: this rank's local plan.
        is_as_cached: True if all ranks have their cached plans.
        is_as_loaded: True if all ranks have the plans of the loaded checkpoint.
        metadata: the metadata, if this save creates any; on the coordinator only.
    """

    central: SavePlan
    local: SavePlan

    def __init__(
        self,
        state_dict: dict[str, Any],
        writer: FileSystemWriterAsync,
        wrapper: _DistWrapper,
        planner: SavePlanner,
    ) -> None:
        self.is_as_cached = False
        self.is_as_loaded = False
        self.metadata: Metadata | None = None
        self._state_dict = state_dict
        self._writer = writer
        self._wrapper = wrapper
        self._planner = planner
        self._is_decentralized = all(
            getattr(one, "can_run_decentralized_global_plan", False) for one in (planner, writer)
        )

    @no_gc()
    def reuse(self, central: SavePlan, local: SavePlan) -> Exception | None:
        """Uses cached plans that are valid on all ranks. Returns an error if the state dict has
        changed."""
        self.central, self.local, self.is_as_cached = central, local, True
        try:
            self._set_up()
            # Take the coordinator's lease before anything can fail, so that a failed save deletes
            # the files of the other ranks.
            self._writer.prepare_local_plan(local)
            known = _structures.get(id(local))
            if known is None or known != self._find_structure():
                require_same(self._assign_files(self._planner.create_local_plan()), local)
        except Exception as error:
            return error
        return None

    def agree(self, ranks: Exchange, loaded: list[SavePlan], cached: SavePlan | None) -> None:
        """Agrees on the plans with the other ranks.

        Args:
            ranks: the ranks of this save.
            loaded: plans of all ranks in a loaded checkpoint; empty if there are none.
            cached: this rank's local plan in the previous save.
        """
        rank, size = self._wrapper.get_rank(), self._wrapper.get_world_size()

        def plan_locally() -> tuple[_PlanMessage, tuple[SavePlan, SavePlan]]:
            self._set_up()
            with no_gc():
                local = self._writer.prepare_local_plan(self._planner.create_local_plan())
            own = self._assign_files(local)
            is_as_cached = cached is not None and same_plans(own, cached)
            has_loaded = self._is_decentralized and len(loaded) == size
            is_as_loaded = has_loaded and same_plans(local, loaded[rank])
            return _PlanMessage(local, is_as_cached, is_as_loaded), (local, own)

        def plan_globally(messages: list[_PlanMessage]) -> Any:
            _core.fault_point("plan of all ranks")
            # No variable, which a traceback would keep, may refer to the target.
            tag = self._writer.target.tag or ""
            plans = [message.plan for message in messages]
            is_as_loaded = all(message.is_as_loaded for message in messages)
            # The ranks may have loaded different checkpoints.
            is_as_loaded = is_as_loaded and all(map(same_plans, plans, loaded))
            is_as_cached = all(message.is_as_cached for message in messages)
            answer = _PlanAnswer(None, tag, is_as_cached, is_as_loaded)
            if is_as_loaded:
                return answer
            central, self.metadata = self._planner.create_global_plan(plans)
            if self._is_decentralized:
                # After a restart, the plans of the first save are compared with these.
                self.metadata.all_local_plans = plans  # type: ignore[attr-defined]
                return answer
            central = self._writer.prepare_global_plan(central)
            # Remove the tag of this save, so that a later save can reuse the plan.
            named = [with_file_prefix(plan, r) for r, plan in enumerate(central)]
            return Answers([answer._replace(central=plan) for plan in named])

        answer: _PlanAnswer
        answer, (local, own) = ranks.exchange("plan", plan_locally, plan_globally)
        self._writer.tag_of_save = answer.tag
        self.local = own if answer.central is None else local
        self.central = own if answer.central is None else answer.central
        self.is_as_cached, self.is_as_loaded = answer.is_as_cached, answer.is_as_loaded

    def remember_structure(self) -> None:
        """Remembers the structure that the local plan was made from, for saves that reuse it."""
        structure = self._find_structure()
        if structure is not None:
            _structures[id(self.local)] = structure
            weakref.finalize(self.local, _structures.pop, id(self.local), None)

    def prepare_write(self, problem: Exception | None) -> SavePlan:
        """Passes the values to the writer. An error is not raised here, but fails the write."""
        try:
            if problem is not None:
                raise problem
            self.central = self._planner.finish_plan(self.central)
            self._writer.prepare_write_data(self.central, self._planner)
        except Exception as error:
            self._writer.fail(error)
        return self.central

    # --- private ---------------------------------------------------------------------------------

    def _set_up(self) -> None:
        # Pass it by keyword, because torch 2.4 inserted an argument before it.
        self._planner.set_up_planner(self._state_dict, is_coordinator=self._wrapper.is_coordinator)
        self._writer.set_up_storage_writer(self._wrapper.is_coordinator)

    def _assign_files(self, local: SavePlan) -> SavePlan:
        """Returns this rank's central plan if it can be derived from the local plan; otherwise,
        returns the local plan."""
        if not self._is_decentralized:
            return local
        central = self._planner.create_decentralized_global_plan(local)  # type: ignore[attr-defined]
        return self._writer.prepare_decentralized_global_plan(central)

    def _find_structure(self) -> Any:
        """Returns the inputs of the local plan, which can be compared faster than plans. Returns
        None if they are unknown, for example because the planner is not torch's."""
        if not keeps_methods(self._planner, DefaultSavePlanner, ("set_up_planner",)):
            return None
        assert isinstance(self._planner, DefaultSavePlanner)
        try:
            state = SaveState(self._planner.state_dict)
            state.plan()
        except Exception:
            return None
        # The metadata contains the nesting of the names, too.
        nesting = dict(getattr(self._planner, "mappings", {}))
        return state.structure, nesting


def _opener_for(wrapper: _DistWrapper, writer: FileSystemWriterAsync) -> Callable[[str], Exchange]:
    """Returns a function that opens exchanges for the steps of one save. Its argument is the suffix
    of the keys.

    The finalization uses keys that begin with the plan's prefix. They do not advance a counter, so
    a rank that fails before it finalizes still uses the same keys as the other ranks later.

    Raises:
        CheckpointError: the wrapper's process group was destroyed.
        ValueError: the coordinator is not rank 0 of the group.
    """
    if wrapper.coordinator_rank != 0:
        raise ValueError(
            f"coordinator_rank must be 0, got {wrapper.coordinator_rank}: torch_ckpt's coordinator "
            "is the first rank of the process group. Pass a group with another first rank"
        )
    if wrapper.use_dist and not is_distributed():
        raise CheckpointError(
            "the process group of this save was destroyed before the save was finalized; "
            "finalize it, or close the queue, before calling destroy_process_group()"
        )
    group = RankGroup.of(wrapper.group, no_dist=not wrapper.use_dist)
    prefix = group.next_prefix("plan") if group.distributed else ""
    return lambda suffix: Exchange(group, prefix + suffix, writer.timeout)
