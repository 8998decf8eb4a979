"""One save by all ranks: plan, write and commit.

1. Every rank sends a :class:`RankMessage` with its contents (saving/save_state.py). A rank whose
   structure has not changed since its last save sends only the number of the plan.
2. The coordinator plans (saving/global_plan.py) and sends each rank a :class:`Reply` with its
   assignment. If no structure has changed, the last plan is used again.
3. Every rank writes its assignment through ``FileSystemWriter.write_values``.
4. The coordinator builds the metadata, including checksum tables, from the plan and the results,
   and commits it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

from torch.distributed.checkpoint.metadata import Metadata

from torch_ckpt import _core
from torch_ckpt._base.cycle_collector import no_gc
from torch_ckpt._base.life_cycle import Part, register
from torch_ckpt._base.log import warn
from torch_ckpt.checkpoint.directory import Place, require_one_directory
from torch_ckpt.checkpoint.lazy_metadata import SavedMetadata
from torch_ckpt.errors import CheckpointError
from torch_ckpt.ranks.exchange import Answers, Exchange
from torch_ckpt.ranks.group import RankGroup
from torch_ckpt.saving.global_plan import Assignment, Contents, GlobalPlan
from torch_ckpt.saving.items import Written, names_of_files
from torch_ckpt.saving.job import Job
from torch_ckpt.saving.rank_write import RankWrite
from torch_ckpt.saving.replica_check import checksums_of, described, differing_values
from torch_ckpt.saving.save_state import SaveState
from torch_ckpt.saving.writer import FileSystemWriter


class RankMessage(NamedTuple):
    """The message of a rank to the coordinator.

    Attributes:
        contents: the rank's contents, or the number of the plan that it has.
        identity: see :attr:`FileSystemWriter.identity`.
        directory: identity of the directory that the rank has opened.
        checksums: of the replicated values, in their order; None if they are not compared.
    """

    contents: Contents | int
    identity: str | None = None
    directory: Place | None = None
    checksums: bytes | None = None


class Reply(NamedTuple):
    """The coordinator's reply to a rank.

    Attributes:
        assignment: the rank's assignment. None: repeat the last one. ``IN_FULL``: the rank must
            send its contents.
        number: number of the plan.
        tag: the text after ``__{rank}_`` in the names of all data files.
        differing: the values that differ between ranks, if they were compared.
    """

    assignment: Assignment | str | None
    number: int
    tag: str
    differing: str = ""


#: Asks a rank that sent the number of a plan for its contents.
IN_FULL = "in full"


class PlanCache:
    """The last plan on which the ranks of a group have agreed. Plans are numbered.

    The number 0 means that there is no plan. A rank that missed a reply has an older number than
    the coordinator; then all ranks plan from scratch.
    """

    _of: ClassVar[WeakKeyDictionary[RankGroup, PlanCache]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self.structure: Any = None
        self.assignment: Assignment | None = None
        self.number = 0
        # Used on the coordinator only.
        self.last_number = 0
        self.plan: GlobalPlan | None = None

    @classmethod
    def of(cls, group: RankGroup) -> PlanCache:
        """Returns the plan cache for the saves of a group of ranks."""
        return cls._of.setdefault(group, cls())

    @classmethod
    def forget_in_child(cls) -> None:
        """Forgets all plans in a forked child, which plans independently."""
        cls._of.clear()

    def contents_to_send(self, state: SaveState, ranks: Exchange) -> Contents | int:
        """Returns a rank's contents, or the number of the plan that it has."""
        if self.assignment is not None and state.structure and state.structure == self.structure:
            return self.number
        return state.contents().to_send(ranks)

    def replies(self, messages: list[RankMessage], ranks: Exchange, tag: str) -> list[Reply]:
        """Returns the replies, indexed by rank, on the coordinator. Equal replies are one
        object, which is sent only once."""
        contents = [message.contents for message in messages]
        assignments = self._assignments_for(
            [one.received(ranks) if isinstance(one, Contents) else one for one in contents]
        )
        first = Reply(assignments[0], self.last_number, tag)
        return [
            first if one is assignments[0] else first._replace(assignment=one)
            for one in assignments
        ]

    @no_gc()
    def _assignments_for(self, contents: list[Contents | int]) -> Sequence[Assignment | str | None]:
        """Returns the assignments, indexed by rank. None repeats the rank's last assignment."""
        numbers = {of_rank for of_rank in contents if isinstance(of_rank, int)}
        if not numbers <= {self.last_number}:
            return [IN_FULL] * len(contents)
        if all(isinstance(of_rank, int) for of_rank in contents):
            return [None] * len(contents)
        _core.fault_point("plan of all ranks")
        before = self.plan.contents if self.plan is not None else []
        in_all = [
            before[rank] if isinstance(of_rank, int) else of_rank
            for rank, of_rank in enumerate(contents)
        ]
        plan = GlobalPlan(in_all)
        self.last_number, self.plan = self.last_number + 1, plan
        return plan.assignments()

    def keep(self, state: SaveState, reply: Reply) -> Assignment:
        """Returns the assignment in a reply. Keeps it for this rank's next save."""
        if isinstance(reply.assignment, Assignment):
            self.structure, self.assignment = state.structure, reply.assignment
            self.number = reply.number
        assert self.assignment is not None
        return self.assignment


register(Part.PLANS, in_child=PlanCache.forget_in_child)


class SaveSession:
    """One save on this rank. The methods follow the steps in the module's docstring.

    If the save fails, the caller abandons the writer.

    Args:
        plans: the cached plan of these ranks. Either all ranks pass the cache of the same saves, or
            all pass a new cache.
        check_replicas: see :func:`torch_ckpt.save`.
        job: the background save that this session belongs to; None: the caller waits for the end.
    """

    def __init__(
        self,
        writer: FileSystemWriter,
        ranks: Exchange,
        plans: PlanCache,
        check_replicas: str,
        job: Job | None = None,
    ) -> None:
        self._writer = writer
        self._ranks = ranks
        self._plans = plans
        self._check_replicas = check_replicas
        self._job = job
        self._write = job.write if job is not None else RankWrite()

    def run(self, read_state: Callable[[], SaveState]) -> Metadata:
        """Saves a state.

        Args:
            read_state: returns this rank's state. Its exception fails the save on all ranks.

        Raises:
            CheckpointException: on every rank, with the cause of each rank that failed.
        """
        reply, state = self._ranks.exchange("plan", lambda: self._message(read_state), self._plan)
        if reply.assignment == IN_FULL:
            reply, _ = self._ranks.exchange("plan", lambda: self._in_full(state), self._plan)
        assignment = self._plans.keep(state, reply)
        if self._job is not None:
            self._job.differing = reply.differing
        with self._ranks.alive(self._bytes_moved):
            saved, _ = self._ranks.exchange(
                "write",
                lambda: self._write_assignment(state, assignment, reply.tag),
                self._commit,
                self._writer.undo,
            )
        return saved.metadata()

    # --- 1. the message --------------------------------------------------------------------------

    def _message(self, read_state: Callable[[], SaveState]) -> tuple[RankMessage, SaveState]:
        writer, state = self._writer, read_state()
        state.plan(writer.storage_meta(), self._ranks.is_coordinator)
        writer.set_up_for_save(self._ranks.rank)
        message = RankMessage(
            self._plans.contents_to_send(state, self._ranks),
            writer.identity,
            Place.of(writer.directory),
            self._checksums(state),
        )
        return message, state

    def _in_full(self, state: SaveState) -> tuple[RankMessage, None]:
        contents = state.contents().to_send(self._ranks)
        return RankMessage(contents, checksums=self._checksums(state)), None

    def _checksums(self, state: SaveState) -> bytes | None:
        if self._check_replicas == "off" or self._ranks.size == 1:
            return None
        with self._device_streams():
            return checksums_of(*state.replicated(), self._check_replicas)

    # --- 2. the plan, on the coordinator ---------------------------------------------------------

    def _plan(self, messages: list[RankMessage]) -> Answers[Reply]:
        _check_same_checkpoint([message.identity for message in messages])
        require_one_directory([message.directory for message in messages])
        replies = self._plans.replies(messages, self._ranks, self._writer.tag)
        if replies[0].assignment != IN_FULL:
            differing = self._compare_replicas([message.checksums for message in messages])
            if differing:
                replies = [reply._replace(differing=differing) for reply in replies]
        return Answers(replies)

    def _compare_replicas(self, checksums: list[bytes | None]) -> str:
        assert self._plans.plan is not None
        if not any(checksums):
            return ""
        text = described(differing_values(self._plans.plan.replicated_names(), checksums))
        if text and self._check_replicas == "error":
            raise CheckpointError(text)
        if text:
            warn(f"{self._writer.destination}: {text}")
        return text

    # --- 3. the write ----------------------------------------------------------------------------

    def _write_assignment(
        self, state: SaveState, assignment: Assignment, tag: str
    ) -> tuple[Written, Written]:
        job, writer = self._job, self._writer
        with self._device_streams():
            names, values = state.values(assignment)
        prefix = _core.choose_prefix(writer.directory, f"__{self._ranks.rank}_{tag}")
        if self._plans.plan is not None:
            self._write.meanwhile = self._plans.plan.describe
        if job is not None:
            job.planned()
        written = state.add_seconds(writer.write_values(prefix, names, values, self._write))
        if job is None:
            return written, written
        try:
            job.written()
        except BaseException:
            writer.undo(written)
            raise
        return written, written

    # --- 4. the commit, on the coordinator -------------------------------------------------------

    def _commit(self, written: list[Written]) -> SavedMetadata:
        plan, writer = self._plans.plan, self._writer
        assert plan is not None
        data = plan.encode(written, writer.storage_meta())
        writer.commit(data, names_of_files(written))
        saved = SavedMetadata(data, writer.destination, self._ranks.size)
        if self._job is not None:
            self._job.committed_items(plan, written)
            self._job.call_back(saved.metadata())
        return saved

    # --- shared by the steps ---------------------------------------------------------------------

    def _device_streams(self) -> AbstractContextManager[object]:
        return self._write.device_streams() if self._job is not None else nullcontext()

    def _bytes_moved(self) -> int:
        moved = self._writer.bytes_moved()
        return moved if self._job is None else moved + self._job.bytes_moved()


def _check_same_checkpoint(identities: list[str | None]) -> None:
    if len(set(identities)) > 1:
        of_ranks = ", ".join(f"rank {rank}: {identity}" for rank, identity in enumerate(identities))
        raise CheckpointError(
            f"ranks save different checkpoints ({of_ranks}): every rank must make the same saves, "
            "in the same order"
        )
