"""The plan of a save, its writing and its commit, by all ranks.

1. Every rank flattens its state dict and tells what it has: a template of plain tensors, DTensors
   and objects (csrc/planning/state_template.h), and a plan of torch's planner for the rest
   (ShardedTensor and others). A rank whose structure is that of its last save says just that.
2. The coordinator gives what several ranks have to one of them, builds the rest's plan with torch's
   planner, and answers. Where no structure has changed, neither has the plan.
3. Every rank writes its part through ``FileSystemWriter.write_values``.
4. The coordinator makes the metadata of what was planned and what was written, checksum tables
   included, and commits it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from torch_ckpt import _C
from torch_ckpt._base.cycle_collector import no_gc
from torch_ckpt._base.log import warn
from torch_ckpt.checkpoint.directory import Place, require_one_directory
from torch_ckpt.checkpoint.flat_state import flat_state
from torch_ckpt.checkpoint.metadata import decoded_when_used, index_of, sealed
from torch_ckpt.checkpoint.objects import unpicklable, warn_of_what_will_not_load
from torch_ckpt.errors import CheckpointError
from torch_ckpt.ranks.meeting import Meeting, Ranks
from torch_ckpt.saving.items import Written, as_value, resolve
from torch_ckpt.saving.job import Job
from torch_ckpt.saving.replica_check import checksums_of, differing_tensors, told
from torch_ckpt.saving.structure import structure_of
from torch_ckpt.saving.unchanged import Fingerprint
from torch_ckpt.saving.writer import DCP_VERSION, FileSystemWriter

StateDict = dict[str, Any]

#: (file name, offset, length, payload CRC-32) of one stored item, in bytes.
_Place = tuple[str, int, int, int]


@dataclass
class _LocalPlan:
    """What one rank has."""

    template: bytes  # of what the engine plans
    rest: SavePlan  # of all else, by torch's planner


class _Posted(NamedTuple):
    """What a rank tells the coordinator."""

    plan: _LocalPlan | int
    identity: str | None = None
    place: Place | None = None
    checksums: bytes | None = None  # of its plain tensors, in their order


@dataclass
class _Task:
    """What one rank shall write."""

    rows: Sequence[int]  # of its template
    rest: SavePlan
    number: int  # of the plan


@dataclass
class _GlobalPlan:
    """The coordinator's view; empty on other ranks."""

    engine: _C.GlobalPlan | None = None
    rest: list[SavePlan] = field(default_factory=list)  # by rank
    rest_metadata: Metadata | None = None


#: The answer to ranks that are to list what they have after all.
_IN_FULL = "in full"


class PlanCache:
    """The last plan that the ranks of a group have agreed on. Plans are numbered.

    The number 0 stands for no plan. A rank that has missed an answer has an older number than the
    coordinator; then all ranks plan anew.
    """

    _of: ClassVar[WeakKeyDictionary[Meeting, PlanCache]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self.structure: Any = None
        self.task: _Task | None = None
        # The coordinator's.
        self.number = 0
        self.local: list[_LocalPlan] = []
        self.agreed = _GlobalPlan()

    @classmethod
    def of(cls, meeting: Meeting) -> PlanCache:
        """That of the saves of a group of ranks."""
        return cls._of.setdefault(meeting, cls())


def save_state(
    state_dict: Callable[[], StateDict],
    writer: FileSystemWriter,
    ranks: Ranks,
    cache: PlanCache,
    check_replicas: str,
    job: Job | None = None,
) -> Metadata:
    """Saves; in the background, where there is a job. The caller abandons the writer then.

    Args:
        state_dict: gives it, without ``Stateful`` values. What it raises fails the save.
        cache: plans of earlier saves of the same ranks; all of them have one, or a new one.
        check_replicas: as for :func:`torch_ckpt.save`.

    Raises:
        CheckpointException: on every rank, with the cause of each rank that failed.
    """
    rest_planner = DefaultSavePlanner(flatten_state_dict=False)
    flattened: list[_C.FlatState] = []
    template = b""
    structure: list[Any] = []

    def local_plan() -> _LocalPlan:
        return _LocalPlan(template, rest_planner.create_local_plan())

    def in_full() -> _Posted:
        return _Posted(local_plan(), checksums=checksums_of_rank())

    def plan_of_rank() -> _Posted:
        plan = plan_locally()
        place = Place.of(writer.directory)
        return _Posted(plan, writer.identity, place, checksums_of_rank())

    def checksums_of_rank() -> bytes | None:
        if check_replicas == "off" or ranks.size == 1:
            return None
        with job.write.device_streams() if job is not None else nullcontext():
            return checksums_of(flattened[0].plain(), check_replicas)

    def compare_replicas(checksums: list[bytes | None]) -> None:
        engine = cache.agreed.engine
        assert engine is not None
        names = [engine.plain_names(rank) for rank in range(ranks.size)]
        lines = differing_tensors(names, checksums) if any(checksums) else []
        if lines and check_replicas == "error":
            raise CheckpointError(told(lines))
        if lines:
            warn(
                f"{writer.destination}: {told(lines)}; save what each rank has for itself under "
                "names of its own, or pass check_replicas='off'"
            )

    @no_gc()
    def plan_locally() -> _LocalPlan | int:
        nonlocal template
        flat = flat_state(state_dict())
        flattened.append(flat)
        rest = {}
        for row in flat.others():
            name, value = flat.name(row), flat.value(row)
            _require_values(name, value)
            if not flat.is_object(row):
                rest[name] = value
        for row in flat.on_meta():
            _require_values(flat.name(row), flat.value(row))
        rest_planner.set_up_planner(rest, writer.storage_meta(), ranks.is_coordinator)
        writer.set_up_for_save(ranks.rank)
        template = _C.template_of(flat)
        known = structure_of(rest)
        if known is not None:
            structure.extend((template, known))
        if cache.task is not None and structure and structure == cache.structure:
            return cache.task.number
        return local_plan()

    def plan_globally(
        posted: list[_Posted],
    ) -> list[tuple[_Task | str | None, str]]:
        _check_same_checkpoint([of_rank.identity for of_rank in posted])
        require_one_directory([of_rank.place for of_rank in posted])
        answers = answers_to([of_rank.plan for of_rank in posted])
        if answers[0] != _IN_FULL:
            compare_replicas([of_rank.checksums for of_rank in posted])
        return [(answer, writer.tag) for answer in answers]

    @no_gc()
    def answers_to(plans: list[_LocalPlan | int]) -> list[_Task | str | None]:
        numbers = {plan for plan in plans if isinstance(plan, int)}
        if not numbers <= {cache.number}:
            return [_IN_FULL] * len(plans)
        if all(isinstance(plan, int) for plan in plans):
            return [None] * len(plans)
        _C.fault_point("plan of all ranks")
        local = [
            cache.local[rank] if isinstance(plan, int) else plan for rank, plan in enumerate(plans)
        ]
        engine = _engine_plan([plan.template for plan in local])
        rest_plans, rest_metadata = rest_planner.create_global_plan([p.rest for p in local])
        agreed = _GlobalPlan(engine, list(rest_plans), rest_metadata)
        cache.number, cache.local, cache.agreed = cache.number + 1, local, agreed
        return [
            _Task(engine.owned(rank), rest, cache.number) for rank, rest in enumerate(rest_plans)
        ]

    answer, tag = ranks.reduce_scatter("plan", plan_of_rank, plan_globally)
    if answer == _IN_FULL:
        answer, tag = ranks.reduce_scatter("plan", in_full, plan_globally)
    if isinstance(answer, _Task):
        cache.structure, cache.task = structure or None, answer
    task = cache.task
    assert task is not None

    def forget() -> None:
        flattened.clear()
        rest_planner.state_dict = {}

    def find_values() -> tuple[list[str], list[Any]]:
        with job.write.device_streams() if job is not None else nullcontext():
            flat = flattened[0]
            with no_gc():
                names, values, others = _C.sources_of(flat, task.rows)
                objects = [number for number in others if flat.is_object(task.rows[number])]
                for number in others:
                    if isinstance(values[number], torch.Tensor):
                        values[number] = as_value(values[number])
            rest_planner.state_dict |= {names[number]: values[number] for number in objects}
            for number in objects:
                item = WriteItem(MetadataIndex(names[number]), WriteItemType.BYTE_IO)
                values[number] = _found(rest_planner, item)
                if job is not None:
                    job.resolved += 1
            for item in rest_planner.finish_plan(task.rest).items:
                names.append(item.index.fqn)
                values.append(_found(rest_planner, item))
                if job is not None:
                    job.resolved += 1
        return names, values

    def write() -> Written:
        names, values = find_values()
        prefix = _C.choose_prefix(writer.directory, f"__{ranks.rank}_{tag}")
        if job is None:
            return writer.write_values(prefix, names, values)
        job.planned()
        job.sources.forget_with(forget)
        written = writer.write_values(prefix, names, values, job.write)
        try:
            job.written()
        except BaseException:
            writer.undo(written)
            raise
        return written

    def commit(written: list[Written]) -> bytes:
        places = [of_rank.places for of_rank in written]
        tables = {name: table for of_rank in written for name, table in of_rank.tables.items()}
        with no_gc():
            data = _encoded(cache.agreed, places, tables, writer.storage_meta())
        writer.commit(data, {place[0] for of_rank in places for place in of_rank})
        if job is not None:
            assert cache.agreed.engine is not None
            engine = cache.agreed.engine
            job.committed_items(_fingerprints(cache.agreed, places), engine.paths())
            job.call_back(decoded_when_used(data))
        return data

    def moved() -> int:
        return writer.bytes_moved() + (job.bytes_moved() if job is not None else 0)

    with ranks.alive(moved):
        return decoded_when_used(ranks.all_reduce("write", write, commit, writer.undo))


def tell_the_others(ranks: Ranks, error: BaseException) -> None:
    """Takes this rank's part in a save or load that it cannot begin; they would wait for it."""

    def fail() -> None:
        raise error

    # The caller has raised it.
    with suppress(BaseException):
        ranks.reduce_scatter("plan", fail, lambda plans: plans)
    ranks.close()


def _require_values(name: str, value: Any) -> None:
    # Not is_meta, which a ShardedTensor of several shards does not have.
    local = getattr(value, "_local_tensor", value)
    if isinstance(value, torch.Tensor) and local.device.type == "meta":
        raise CheckpointError(
            f"{name}: a tensor on the meta device has no values to save; give it memory and values "
            "first (module.to_empty(device=...), then initialize or load it), or leave it out"
        )


def _found(planner: DefaultSavePlanner, item: WriteItem) -> Any:
    """What is written for an item that is not a plain tensor.

    Raises:
        CheckpointError: it cannot be pickled.
    """
    name = item.index.fqn
    value = planner.state_dict.get(name)
    if item.type != WriteItemType.BYTE_IO:
        found = resolve(planner, item)
        if type(value) is not DTensor and not isinstance(found, torch.Tensor):
            warn_of_what_will_not_load(name, value, found)
        return found
    try:
        found = resolve(planner, item)
    except Exception as error:
        raise unpicklable(name, value, error) from None
    # AppState looks at what it wraps, by the caller's names.
    if type(value) is not SimpleNamespace:
        warn_of_what_will_not_load(name, value, found)
    return found


def _check_same_checkpoint(identities: list[str | None]) -> None:
    if len(set(identities)) > 1:
        of_ranks = ", ".join(f"rank {rank}: {identity}" for rank, identity in enumerate(identities))
        raise CheckpointError(
            f"ranks save different checkpoints ({of_ranks}): every rank must make the same saves, "
            "in the same order"
        )


def _engine_plan(templates: list[bytes]) -> _C.GlobalPlan:
    try:
        return _C.GlobalPlan(templates)
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def _encoded(
    agreed: _GlobalPlan,
    places: list[list[_Place]],
    tables: dict[str, bytes],
    storage_meta: StorageMeta | None,
) -> bytes:
    """The contents of ``.metadata``."""
    engine, rest = agreed.engine, agreed.rest_metadata
    assert engine is not None
    assert rest is not None
    of_rest = None
    if rest.state_dict_metadata:
        for name in rest.state_dict_metadata:
            if engine.plans(name):
                raise CheckpointError(
                    f"{name}: ranks have different kinds of tensors or objects under this name"
                )
        storage = {
            item.index: _StorageInfo(*place[:3])
            for rank, plan in enumerate(agreed.rest)
            for item, place in zip(plan.items, _of_rest(agreed, places, rank), strict=True)
        }
        of_rest = index_of(Metadata(rest.state_dict_metadata, storage_data=storage), "rest")
    meta = (
        []
        if storage_meta is None
        else [
            (name, value)
            for name, value in vars(storage_meta).items()
            if value is None or isinstance(value, str)
        ]
    )
    return sealed(engine.encode(places, tables, of_rest, meta, DCP_VERSION))


def _of_rest(agreed: _GlobalPlan, places: list[list[_Place]], rank: int) -> list[_Place]:
    """Where a rank has stored what torch's planner plans: behind all else."""
    assert agreed.engine is not None
    return places[rank][len(agreed.engine.owned(rank)) :]


@no_gc()
def _fingerprints(agreed: _GlobalPlan, places: list[list[_Place]]) -> dict[str, Fingerprint]:
    """What the detector of unchanged states needs, from what was written anyway."""
    assert agreed.engine is not None
    found: dict[str, Fingerprint] = agreed.engine.fingerprints(places)
    parts: dict[str, list[tuple[tuple[int, ...], int]]] = {}
    for rank, rest in enumerate(agreed.rest):
        for item, place in zip(rest.items, _of_rest(agreed, places, rank), strict=True):
            offset = tuple(item.index.offset or ())
            parts.setdefault(item.index.fqn, []).append((offset, place[3]))
    found.update((name, (False, tuple(sorted(of_name)))) for name, of_name in parts.items())
    return found
