"""One save by all ranks: plan, write and commit.

1. Every rank sends its contents (saving/plan.py). A rank whose structure is that of its last save
   sends only the number of the plan.
2. The coordinator plans and answers. If no structure has changed, the last plan is used again.
3. Every rank writes its assignment through ``FileSystemWriter.write_values``.
4. The coordinator builds the metadata, including checksum tables, from the plan and the results,
   and commits it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

from torch.distributed.checkpoint.metadata import Metadata

from torch_ckpt import _core
from torch_ckpt._base.cycle_collector import no_gc
from torch_ckpt._base.life_cycle import Part, register
from torch_ckpt._base.log import warn
from torch_ckpt.checkpoint.directory import Place, require_one_directory
from torch_ckpt.checkpoint.saved_metadata import SavedMetadata
from torch_ckpt.errors import CheckpointError
from torch_ckpt.ranks.meeting import Meeting, Ranks
from torch_ckpt.saving.items import Written, names_of_files
from torch_ckpt.saving.job import Job
from torch_ckpt.saving.plan import GlobalPlan, RankState, StateDict, Task, Told
from torch_ckpt.saving.rank_write import RankWrite
from torch_ckpt.saving.replica_check import checksums_of, described, differing_values
from torch_ckpt.saving.writer import FileSystemWriter


class Posted(NamedTuple):
    """The message of a rank to the coordinator."""

    plan: Told | int
    identity: str | None = None
    place: Place | None = None
    checksums: bytes | None = None  # of the replicated values, in their order


class Answer(NamedTuple):
    """The answer of the coordinator to a rank."""

    task: Task | str | None
    number: int  # number of the plan
    tag: str
    differing: str = ""  # the values that differ between ranks, if they were compared


#: Answer to ranks that sent the number of a plan, but must send their contents.
IN_FULL = "in full"


class PlanCache:
    """The last plan on which the ranks of a group have agreed. Plans are numbered.

    The number 0 stands for no plan. A rank that has missed an answer has an older number than the
    coordinator; then all ranks plan from scratch.
    """

    _of: ClassVar[WeakKeyDictionary[Meeting, PlanCache]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self.structure: Any = None
        self.task: Task | None = None
        self.number = 0
        # Used on the coordinator only.
        self.last_number = 0
        self.plan: GlobalPlan | None = None

    @classmethod
    def of(cls, meeting: Meeting) -> PlanCache:
        """Returns the cache of the saves of a group of ranks."""
        return cls._of.setdefault(meeting, cls())

    @classmethod
    def forget_in_child(cls) -> None:
        """Forgets all plans in a forked child, which plans independently."""
        cls._of.clear()

    def told(self, state: RankState, ranks: Ranks) -> Told | int:
        """Returns a rank's message: its contents, or the number of the plan that it has."""
        if self.task is not None and state.structure and state.structure == self.structure:
            return self.number
        return state.told().to_send(ranks)

    def answers(self, posted: list[Posted], ranks: Ranks, tag: str) -> list[Answer]:
        """Returns the answers by rank, on the coordinator; one object if all ranks get the same
        answer."""
        told = [of_rank.plan for of_rank in posted]
        tasks = self._tasks_for(
            [plan.received(ranks) if isinstance(plan, Told) else plan for plan in told]
        )
        first = Answer(tasks[0], self.last_number, tag)
        return [first if task is tasks[0] else first._replace(task=task) for task in tasks]

    @no_gc()
    def _tasks_for(self, told: list[Told | int]) -> Sequence[Task | str | None]:
        """Returns the assignments by rank; None stands for that of the last plan."""
        numbers = {of_rank for of_rank in told if isinstance(of_rank, int)}
        if not numbers <= {self.last_number}:
            return [IN_FULL] * len(told)
        if all(isinstance(of_rank, int) for of_rank in told):
            return [None] * len(told)
        _core.fault_point("plan of all ranks")
        before = self.plan.contents if self.plan is not None else []
        in_all = [
            before[rank] if isinstance(of_rank, int) else of_rank
            for rank, of_rank in enumerate(told)
        ]
        plan = GlobalPlan(in_all)
        self.last_number, self.plan = self.last_number + 1, plan
        return plan.tasks()

    def keep(self, state: RankState, answer: Answer) -> Task:
        """Returns the assignment in an answer, and keeps it for this rank's next save."""
        if isinstance(answer.task, Task):
            self.structure, self.task = state.structure, answer.task
            self.number = answer.number
        assert self.task is not None
        return self.task


register(Part.PLANS, in_child=PlanCache.forget_in_child)


def save_state(
    state_dict: Callable[[], StateDict],
    writer: FileSystemWriter,
    ranks: Ranks,
    cache: PlanCache,
    check_replicas: str,
    job: Job | None = None,
) -> Metadata:
    """Saves a state dict; in the background if there is a job. If this fails, the caller abandons
    the writer.

    Args:
        state_dict: returns the state dict, without ``Stateful`` values. Its exception fails the
            save.
        cache: plans of earlier saves of the same ranks. All ranks pass a cache of the same saves,
            or all pass a new one.
        check_replicas: see :func:`torch_ckpt.save`.

    Raises:
        CheckpointException: on every rank, with the cause of each rank that failed.
    """
    states: list[RankState] = []

    def in_full() -> Posted:
        return Posted(states[0].told().to_send(ranks), checksums=checksums_of_rank())

    def plan_of_rank() -> Posted:
        plan = plan_locally()
        place = Place.of(writer.directory)
        return Posted(plan, writer.identity, place, checksums_of_rank())

    def checksums_of_rank() -> bytes | None:
        if check_replicas == "off" or ranks.size == 1:
            return None
        with device_streams():
            return checksums_of(*states[0].replicated(), check_replicas)

    def device_streams() -> AbstractContextManager[object]:
        return job.write.device_streams() if job is not None else nullcontext()

    def compare_replicas(checksums: list[bytes | None]) -> str:
        assert cache.plan is not None
        if not any(checksums):
            return ""
        text = described(differing_values(cache.plan.replicated_names(), checksums))
        if text and check_replicas == "error":
            raise CheckpointError(text)
        if text:
            warn(f"{writer.destination}: {text}")
        return text

    @no_gc()
    def plan_locally() -> Told | int:
        state = RankState(state_dict(), writer.storage_meta(), ranks.is_coordinator)
        states.append(state)
        writer.set_up_for_save(ranks.rank)
        return cache.told(state, ranks)

    def plan_globally(posted: list[Posted]) -> list[Answer]:
        _check_same_checkpoint([of_rank.identity for of_rank in posted])
        require_one_directory([of_rank.place for of_rank in posted])
        answers = cache.answers(posted, ranks, writer.tag)
        if answers[0].task != IN_FULL:
            differing = compare_replicas([of_rank.checksums for of_rank in posted])
            if differing:
                answers = [answer._replace(differing=differing) for answer in answers]
        return answers

    answer = ranks.reduce_scatter("plan", plan_of_rank, plan_globally)
    if answer.task == IN_FULL:
        answer = ranks.reduce_scatter("plan", in_full, plan_globally)
    task = cache.keep(states[0], answer)
    if job is not None:
        job.differing = answer.differing

    def found() -> None:
        if job is not None:
            job.resolved += 1

    def write() -> Written:
        with device_streams():
            names, values = states[0].values(task, found)
        prefix = _core.choose_prefix(writer.directory, f"__{ranks.rank}_{answer.tag}")
        engine_write = job.write if job is not None else RankWrite()
        if cache.plan is not None:
            engine_write.meanwhile = cache.plan.describe
        if job is not None:
            job.planned()
            job.sources.forget_with(states[0].forget)
        written = states[0].add_seconds(writer.write_values(prefix, names, values, engine_write))
        if job is None:
            return written
        try:
            job.written()
        except BaseException:
            writer.undo(written)
            raise
        return written

    def commit(written: list[Written]) -> SavedMetadata:
        plan = cache.plan
        assert plan is not None
        data = plan.encode(written, writer.storage_meta())
        writer.commit(data, names_of_files(written))
        saved = SavedMetadata(data, writer.destination, ranks.size)
        if job is not None:
            job.committed_items(plan, written)
            job.call_back(saved.metadata())
        return saved

    def moved() -> int:
        return writer.bytes_moved() + (job.bytes_moved() if job is not None else 0)

    with ranks.alive(moved):
        return ranks.all_reduce("write", write, commit, writer.undo).metadata()


def tell_the_others(ranks: Ranks, error: BaseException) -> None:
    """Takes this rank's part in a save or load that it cannot start, so that the other ranks do not
    wait for it."""

    def fail() -> None:
        raise error

    # The caller raises the error itself.
    with suppress(BaseException):
        ranks.reduce_scatter("plan", fail, lambda plans: plans)
    ranks.close()


def _check_same_checkpoint(identities: list[str | None]) -> None:
    if len(set(identities)) > 1:
        of_ranks = ", ".join(f"rank {rank}: {identity}" for rank, identity in enumerate(identities))
        raise CheckpointError(
            f"ranks save different checkpoints ({of_ranks}): every rank must make the same saves, "
            "in the same order"
        )
