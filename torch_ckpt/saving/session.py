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

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

from torch.distributed.checkpoint.metadata import Metadata

from torch_ckpt import _core
from torch_ckpt._base.life_cycle import Part, register
from torch_ckpt._base.log import warn
from torch_ckpt.checkpoint.directory import DirectoryIdentity, require_one_directory
from torch_ckpt.errors import CheckpointError
from torch_ckpt.ranks.exchange import Answers, Exchange
from torch_ckpt.ranks.group import RankGroup
from torch_ckpt.saving.global_plan import Assignment, Contents, GlobalPlan
from torch_ckpt.saving.items import Written
from torch_ckpt.saving.job import Job
from torch_ckpt.saving.rank_write import RankWrite
from torch_ckpt.saving.replica_check import description_of
from torch_ckpt.saving.save_state import SaveState, StateDict
from torch_ckpt.saving.writer import FileSystemWriter, Saved


class RankMessage(NamedTuple):
    """The message of a rank to the coordinator.

    Attributes:
        contents: the rank's contents, or the number of the plan that it has.
        identity: see :attr:`FileSystemWriter.identity`.
        directory: identity of the directory that the rank has opened.
        fingerprints: see :meth:`SaveState.fingerprints`; None if replicas are not compared.
        offered_memory: see :meth:`FileSystemWriter.offer_memory`.
    """

    contents: Contents | int
    identity: str | None
    directory: DirectoryIdentity
    fingerprints: bytes | None
    offered_memory: bytes


class Reply(NamedTuple):
    """The coordinator's reply to a rank.

    Attributes:
        assignment: the rank's assignment. None: repeat the last one.
        number: number of the plan; 0 asks all ranks for their contents.
        tag: the text after ``__{rank}_`` in the names of all data files.
        differing: the values that differ between ranks, if they were compared.
        places: see :meth:`FileSystemWriter.places`.
    """

    assignment: Assignment | None
    number: int
    tag: str = ""
    differing: str = ""
    places: bytes = b""


class PlanCache:
    """The last plan on which the ranks of a group have agreed. Plans are numbered from 1.

    A rank that missed a reply has an older number than the coordinator; then all ranks plan from
    scratch.
    """

    _of: ClassVar[WeakKeyDictionary[RankGroup, PlanCache]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self.structure: Any = None
        self.assignment = Assignment(b"")
        self.number = 0
        # Used on the coordinator only.
        self.last_number = 0
        self.plan: GlobalPlan | None = None

    def assign(
        self, contents: list[Contents | int], ranks: Exchange
    ) -> Sequence[Assignment | None] | None:
        """Returns the assignments, indexed by rank, on the coordinator.

        An assignment is None if the rank repeats its last one. Instead of all assignments, returns
        None if all ranks must send their contents.

        Args:
            contents: the contents of each rank, or the number of the plan that the rank has.
        """
        if any(isinstance(one, int) and one != self.last_number for one in contents):
            return None
        if all(isinstance(one, int) for one in contents):
            return [None] * len(contents)
        _core.fault_point("plan of all ranks")
        complete = []
        for rank, one in enumerate(contents):
            if isinstance(one, Contents):
                one.template = ranks.shared(one.template)
                complete.append(one)
            else:
                assert self.plan is not None
                complete.append(self.plan.contents[rank])
        self.plan = GlobalPlan(complete)
        self.last_number += 1
        return self.plan.assignments

    def keep(self, structure: Any, reply: Reply) -> None:
        """Keeps the assignment of this rank, whose state has the given structure."""
        if reply.assignment is not None:
            self.structure, self.assignment = structure, reply.assignment
        self.number = reply.number

    @classmethod
    def of(cls, group: RankGroup) -> PlanCache:
        """Returns the plan cache for the saves of a group of ranks."""
        found = cls._of.get(group)
        return cls._of.setdefault(group, cls()) if found is None else found

    @classmethod
    def forget_in_child(cls) -> None:
        """Forgets all plans in a forked child, which plans independently."""
        cls._of.clear()


register(Part.PLANS, in_child=PlanCache.forget_in_child)


class SaveSession:
    """One save on this rank. The methods follow the steps in the module's docstring.

    Args:
        plans: the cached plan of these ranks. Either all ranks pass the cache of the same saves, or
            all pass a new cache.
        check_replicas: see :func:`torch_ckpt.save`.
        read_values: returns the values to save, without ``Stateful`` values. An exception fails the
            save on all ranks. A background save has read the values already.
        job: the background save that this session belongs to; None: the caller waits for the end.
    """

    def __init__(
        self,
        writer: FileSystemWriter,
        ranks: Exchange,
        plans: PlanCache,
        check_replicas: str,
        *,
        read_values: Callable[[], StateDict] = dict,
        job: Job | None = None,
    ) -> None:
        self._writer = writer
        self._ranks = ranks
        self._plans = plans
        self._check_replicas = check_replicas
        self._read_values = read_values
        self._job = job
        self._write = job.write if job is not None else RankWrite()
        if job is not None:
            job.moved_by_writer = writer.bytes_moved

    def run(self) -> Metadata:
        """Saves the state dict.

        Raises:
            CheckpointException: on every rank, with the cause of each rank that failed.
        """
        ranks, writer = self._ranks, self._writer
        try:
            reply, state = ranks.exchange("plan", self._read_and_describe, self._plan)
            if reply.number == 0:
                reply, _ = ranks.exchange("plan", lambda: self._describe(state, 0), self._plan)
            with ranks.alive(writer.bytes_moved if self._job is None else self._job.bytes_moved):
                saved, _ = ranks.exchange(
                    "write", lambda: self._write_values(state, reply), self._commit, writer.undo
                )
            return saved.metadata()
        finally:
            writer.abandon()

    # --- 1. the message --------------------------------------------------------------------------

    def _read_and_describe(self) -> tuple[RankMessage, SaveState]:
        if self._job is None:
            state = SaveState(self._read_values())
        elif self._job.abandoned is not None:
            raise self._job.abandoned
        else:
            state = self._job.state
        self._writer.prepare_state(state)
        state.plan()
        self._writer.set_up_for_save(self._ranks.rank)
        is_known = state.structure == self._plans.structure
        return self._describe(state, self._plans.number if is_known else 0)

    def _describe(self, state: SaveState, number: int) -> tuple[RankMessage, SaveState]:
        """Returns this rank's message, with its contents unless it has a plan."""
        fingerprints = None
        if self._check_replicas != "off" and self._ranks.size > 1:
            with self._write.device_streams():
                fingerprints = state.fingerprints(self._check_replicas)
        contents = number or state.contents(self._ranks.share)
        writer = self._writer
        directory = DirectoryIdentity.of(writer.directory)
        offered = writer.offer_memory() if self._ranks.size > 1 else b""
        return RankMessage(contents, writer.identity, directory, fingerprints, offered), state

    # --- 2. the plan, on the coordinator ---------------------------------------------------------

    def _plan(self, messages: list[RankMessage]) -> Answers[Reply]:
        """Returns the replies, indexed by rank."""
        _require_one_checkpoint([message.identity for message in messages])
        require_one_directory([message.directory for message in messages])
        plans = self._plans
        assignments = plans.assign([message.contents for message in messages], self._ranks)
        if assignments is None:
            return Answers([Reply(None, 0)] * len(messages))
        differing = self._compare_replicas([message.fingerprints for message in messages])
        assert plans.plan is not None
        places = self._writer.places(plans.plan, [message.offered_memory for message in messages])
        replies = replies_of(assignments, plans.last_number, self._writer.tag, differing)
        if not places:
            return replies
        # Equal replies are one object, which is sent only once.
        made: dict[tuple[int, int], Reply] = {}
        return Answers(
            made.setdefault((id(reply), id(one)), reply._replace(places=one))
            for reply, one in zip(replies, places, strict=True)
        )

    def _compare_replicas(self, fingerprints: list[bytes | None]) -> str:
        """Returns a description of the values that differ between ranks, or an empty string."""
        assert self._plans.plan is not None
        differing = self._plans.plan.engine.differing_replicas(fingerprints)
        if not differing:
            return ""
        text = description_of(differing)
        if self._check_replicas == "error":
            raise CheckpointError(text)
        warn(f"{self._writer.destination}: {text}")
        return text

    # --- 3. the write ----------------------------------------------------------------------------

    def _write_values(self, state: SaveState, reply: Reply) -> tuple[Written, Written]:
        """Writes the assignment of this rank."""
        job, writer, plans = self._job, self._writer, self._plans
        plans.keep(state.structure, reply)
        with self._write.device_streams():
            with writer.working():
                checksums = state.checksums(plans.assignment)
            sources = writer.sources(state, plans.assignment, reply.places)
        prefix = writer.prefix_of_files(reply.tag)
        self._write.meanwhile = partial(self._prepare_commit, state)
        if job is not None:
            job.differing = reply.differing
            job.metrics.planning_s = time.perf_counter() - job.begun
        written = writer.write_values(prefix, sources, self._write)
        written.seconds = (*state.seconds, *written.seconds)
        if checksums:
            written.checksums = checksums
        if job is not None:
            job.metrics.written_s = time.perf_counter() - job.begun
            try:
                if job.write_done is not None:
                    job.write_done()
            except BaseException:
                writer.undo(written)
                raise
        return written, written

    def _prepare_commit(self, state: SaveState) -> None:
        """Encodes the metadata on the coordinator, and releases the values. The engine writes
        meanwhile."""
        if self._plans.plan is not None:
            self._writer.prepare_commit(self._plans.plan)
        state.release()

    # --- 4. the commit, on the coordinator -------------------------------------------------------

    def _commit(self, written: list[Written]) -> Saved:
        plan, writer = self._plans.plan, self._writer
        assert plan is not None
        plan.require_equal_copies(written)
        saved = writer.commit_plan(plan, written, self._ranks.size)
        job = self._job
        if job is not None and job.unchanged is not None and writer.finds_unchanged:
            job.warning = job.unchanged.check(plan, written, job.metrics.path)
        if job is not None and job.on_commit is not None:
            job.call_on_commit(saved.metadata())
        return saved


def replies_of(
    assignments: Sequence[Assignment | None], number: int, tag: str, differing: str = ""
) -> Answers[Reply]:
    """Returns the replies, indexed by rank. Equal replies are one object, which is sent only
    once."""
    first = Reply(assignments[0], number, tag, differing)
    return Answers(
        [first if one is assignments[0] else first._replace(assignment=one) for one in assignments]
    )


def _require_one_checkpoint(identities: list[str | None]) -> None:
    if len(set(identities)) > 1:
        of_ranks = ", ".join(f"rank {rank}: {identity}" for rank, identity in enumerate(identities))
        raise CheckpointError(
            f"ranks save different checkpoints ({of_ranks}): every rank must make the same saves, "
            "in the same order"
        )
