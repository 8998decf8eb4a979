"""The plan of a save, its writing and its commit, by all ranks.

1. Every rank flattens its state dict and lists what it has: short tuples for plain tensors, a plan
   of torch's planner for the rest (DTensor, ShardedTensor, objects). A rank whose structure is that
   of its last save says just that.
2. The coordinator gives every replicated tensor to one rank, builds the rest's plan with torch's
   planner, and answers. Where no structure has changed, neither has the plan.
3. Every rank writes its part through ``FileSystemWriter.write_values``.
4. The coordinator builds the metadata from what was planned and what was written, checksum tables
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
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from torch_ckpt import _C
from torch_ckpt._base.cycle_collector import no_gc
from torch_ckpt._base.log import warn
from torch_ckpt.checkpoint.directory import Place, require_one_directory
from torch_ckpt.checkpoint.metadata import encode_metadata, with_checksum_tables
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

#: (name, dtype, size, requires_grad) of one plain tensor.
_PlainRow = tuple[str, torch.dtype, torch.Size, bool]
#: (file name, offset, length, payload CRC-32) of one stored item, in bytes.
_Place = tuple[str, int, int, int]


@dataclass
class _LocalPlan:
    """What one rank has."""

    plain: list[_PlainRow]
    rest: SavePlan  # of all that is not a plain tensor, by torch's planner
    paths: dict[str, Any]  # flattened name -> path in the nested state dict


class _Posted(NamedTuple):
    """What a rank tells the coordinator."""

    plan: _LocalPlan | int
    identity: str | None = None
    place: Place | None = None
    checksums: bytes | None = None  # of its plain tensors, in their order


@dataclass
class _Task:
    """What one rank shall write."""

    plain: Sequence[int]  # indices into its plain rows
    rest: SavePlan
    number: int  # of the plan


@dataclass
class _GlobalPlan:
    """The coordinator's view; empty on other ranks."""

    owned: list[list[_PlainRow]] = field(default_factory=list)  # by rank
    rest: list[SavePlan] = field(default_factory=list)  # by rank
    rest_metadata: Metadata | None = None
    paths: dict[str, Any] = field(default_factory=dict)


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
    whole = DefaultSavePlanner()
    rest_planner = DefaultSavePlanner(flatten_state_dict=False)
    plain: dict[str, torch.Tensor] = {}
    rows: list[_PlainRow] = []
    structure: list[Any] = []

    def local_plan() -> _LocalPlan:
        return _LocalPlan(rows, rest_planner.create_local_plan(), whole.mappings)

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
            return checksums_of(plain.values(), check_replicas)

    def compare_replicas(checksums: list[bytes | None]) -> None:
        names = [[row[0] for row in of_rank.plain] for of_rank in cache.local]
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
        whole.set_up_planner(state_dict(), writer.storage_meta(), ranks.is_coordinator)
        rest = {}
        for name, value in whole.state_dict.items():
            _require_values(name, value)
            if type(value) in (torch.Tensor, torch.nn.Parameter):
                plain[name] = value
            else:
                rest[name] = value
        rest_planner.set_up_planner(rest, writer.storage_meta(), ranks.is_coordinator)
        writer.set_up_for_save(ranks.rank)
        rows.extend((name, t.dtype, t.size(), t.requires_grad) for name, t in plain.items())
        known = structure_of(rest)
        if known is not None:
            structure.extend((rows, known, whole.mappings))
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
        agreed = _GlobalPlan()
        rest_plans, agreed.rest_metadata = rest_planner.create_global_plan([p.rest for p in local])
        owned = _choose_owners([p.plain for p in local])
        _check_no_name_is_both(owned, local, agreed.rest_metadata)
        agreed.owned = [
            [p.plain[i] for i in indices] for p, indices in zip(local, owned, strict=True)
        ]
        agreed.rest = list(rest_plans)
        for plan in local:
            agreed.paths.update(plan.paths)
        cache.number, cache.local, cache.agreed = cache.number + 1, local, agreed
        return [_Task(i, r, cache.number) for i, r in zip(owned, rest_plans, strict=True)]

    answer, tag = ranks.reduce_scatter("plan", plan_of_rank, plan_globally)
    if answer == _IN_FULL:
        answer, tag = ranks.reduce_scatter("plan", in_full, plan_globally)
    if isinstance(answer, _Task):
        cache.structure, cache.task = structure or None, answer
    task = cache.task
    assert task is not None

    def forget() -> None:
        plain.clear()
        whole.state_dict = {}
        rest_planner.state_dict = {}

    def find_values() -> tuple[list[str], list[Any]]:
        names: list[str] = []
        values: list[Any] = []
        with job.write.device_streams() if job is not None else nullcontext():
            with no_gc():
                names.extend(rows[i][0] for i in task.plain)
                values.extend(as_value(plain[name]) for name in names)
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

    def commit(written: list[Written]) -> Metadata:
        places = [of_rank.places for of_rank in written]
        tables = {name: table for of_rank in written for name, table in of_rank.tables.items()}
        with no_gc():
            metadata = _build_metadata(cache.agreed, places, tables)
            metadata.version = DCP_VERSION
            metadata.storage_meta = writer.storage_meta()
        files = {place[0] for of_rank in places for place in of_rank}
        writer.commit(encode_metadata(metadata), files)
        if job is not None:
            job.committed_items(_fingerprints(cache.agreed, places), cache.agreed.paths)
            job.call_back(metadata)
        return metadata

    def moved() -> int:
        return writer.bytes_moved() + (job.bytes_moved() if job is not None else 0)

    with ranks.alive(moved):
        return ranks.all_reduce("write", write, commit, writer.undo)


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


def _choose_owners(plain: list[list[_PlainRow]]) -> list[list[int]]:
    """Which of its plain tensors each rank writes: each name once, the bytes spread evenly.

    What only one rank has comes first, then what several have goes to the emptiest of them (as
    torch's dedup_save_plans, by bytes).

    Raises:
        CheckpointError: ranks have different tensors under one name.
    """
    if len(plain) == 1:
        return [list(range(len(plain[0])))]
    holders: dict[str, list[tuple[int, int]]] = {}
    for rank, rows in enumerate(plain):
        for index, row in enumerate(rows):
            holders.setdefault(row[0], []).append((rank, index))
    owned: list[list[int]] = [[] for _ in plain]
    load = [0] * len(plain)
    for several in (False, True):
        for name, places in holders.items():
            if (len(places) > 1) is not several:
                continue
            first = plain[places[0][0]][places[0][1]]
            for other_rank, other_index in places[1:]:
                other = plain[other_rank][other_index]
                if other[1:3] != first[1:3]:
                    raise CheckpointError(
                        f"{name}: rank {places[0][0]} has {first[1]} {list(first[2])}, rank "
                        f"{other_rank} has {other[1]} {list(other[2])}; a plain tensor is taken to "
                        "be the same on all ranks, so only one of them would be saved"
                    )
            rank, index = min(places, key=lambda place: load[place[0]])
            owned[rank].append(index)
            load[rank] += first[2].numel() * first[1].itemsize
    return owned


def _check_no_name_is_both(
    owned: list[list[int]], plans: list[_LocalPlan], rest: Metadata | None
) -> None:
    if rest is None or not rest.state_dict_metadata:
        return
    for plan, indices in zip(plans, owned, strict=True):
        for index in indices:
            if plan.plain[index][0] in rest.state_dict_metadata:
                raise CheckpointError(
                    f"{plan.plain[index][0]}: a plain tensor on one rank and something else on "
                    "another"
                )


def _build_metadata(
    agreed: _GlobalPlan, places: list[list[_Place]], tables: dict[str, bytes]
) -> Metadata:
    assert agreed.rest_metadata is not None
    # The plan's own stays as it is, for the next save.
    metadata = with_checksum_tables(agreed.rest_metadata, tables)
    stored = dict(metadata.state_dict_metadata)
    storage: dict[MetadataIndex, _StorageInfo] = {}
    properties: dict[tuple[torch.dtype, bool], TensorProperties] = {}
    chunks: dict[torch.Size, ChunkStorageMetadata] = {}
    for rows, rest, of_rank in zip(agreed.owned, agreed.rest, places, strict=True):
        for (name, dtype, size, requires_grad), place in zip(rows, of_rank, strict=False):
            key = (dtype, requires_grad)
            if key not in properties:
                properties[key] = TensorProperties(dtype=dtype, requires_grad=requires_grad)
            chunk = chunks.get(size)
            if chunk is None:
                zeros = torch.Size([0] * len(size))
                chunk = chunks[size] = ChunkStorageMetadata(offsets=zeros, sizes=size)
            stored[name] = TensorStorageMetadata(properties[key], chunk.sizes, [chunk])
            storage[MetadataIndex(name, chunk.offsets)] = _StorageInfo(*place[:3])
        for item, place in zip(rest.items, of_rank[len(rows) :], strict=True):
            storage[item.index] = _StorageInfo(*place[:3])
    # The order of the flattened state dict, as stock torch has it.
    metadata.state_dict_metadata = {n: stored[n] for n in agreed.paths if n in stored}
    metadata.planner_data = dict(agreed.paths)
    metadata.storage_data = storage
    return metadata


@no_gc()
def _fingerprints(agreed: _GlobalPlan, places: list[list[_Place]]) -> dict[str, Fingerprint]:
    """What the detector of unchanged states needs, from what was written anyway."""
    found: dict[str, Fingerprint] = {}
    parts: dict[str, list[tuple[tuple[int, ...], int]]] = {}
    for rows, rest, of_rank in zip(agreed.owned, agreed.rest, places, strict=True):
        for (name, _dtype, size, _grad), place in zip(rows, of_rank, strict=False):
            found[name] = (size.numel() <= 1, place[3])
        for item, place in zip(rest.items, of_rank[len(rows) :], strict=True):
            name = item.index.fqn
            if item.type == WriteItemType.BYTE_IO:
                found[name] = (True, place[3])
            else:
                parts.setdefault(name, []).append((tuple(item.index.offset or ()), place[3]))
    found.update((name, (False, tuple(sorted(of_name)))) for name, of_name in parts.items())
    return found
