"""One save by all ranks: describe, assign, write, commit.

1. Every rank describes its state (saving/save_state.py) and opens the target (saving/target.py). It
   sends a :class:`Message`. If the structure of its state has not changed since its last save, the
   message contains only the number of the plan.
2. The coordinator assigns each item to a rank that has it (csrc/planning/save_coordinator.h), lays
   out the files, and replies to each rank. If no structure has changed, it uses the last plan
   again.
3. Every rank writes its items with the engine (saving/write.py). For some targets, ranks assemble
   files from what other ranks send meanwhile.
4. The coordinator encodes the metadata from the plan and the results, and commits the target. For
   some targets, all ranks then complete the save.

``save`` runs these steps in the calling thread. A background save runs them in a thread of its own
(saving/handle.py), with a snapshot of the state that the call has taken.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from torch_ckpt import _C
from torch_ckpt._base.cuda_events import record_events
from torch_ckpt._base.log import warn
from torch_ckpt._base.progress import Progress
from torch_ckpt.checkpoint.metrics import SaveMetrics
from torch_ckpt.checkpoint.opened import Checkpoint
from torch_ckpt.errors import CheckpointError
from torch_ckpt.ranks.exchange import Answers, Exchange
from torch_ckpt.saving.agreed_plan import AgreedPlan
from torch_ckpt.saving.replica_check import description_of, text_of_copies
from torch_ckpt.saving.save_state import SaveState, StateDict
from torch_ckpt.saving.target import Opened, Target
from torch_ckpt.saving.write import Events, Written, progress_of, write_files
from torch_ckpt.state.states import States

# What to do about SourceChanged.
_ADVICE = (
    "Before the next step, call guard(optimizer) or wait until the save is staged (wait_staged() "
    'of its handle, or wait_until_staged() of a manager); or save with staging="blocking". '
    "Buffers, such as the statistics of BatchNorm, change in the forward pass, which guard() does "
    "not delay: wait before the forward pass"
)


class Message(NamedTuple):
    """The message of a rank to the coordinator.

    Attributes:
        template: the template of the rank's state, or a token for it; see :meth:`Exchange.share`.
            None if the rank has the plan.
        plan: the message of the rank's plan.
        opened: the target that the rank has opened.
    """

    template: bytes | str | None
    plan: bytes
    opened: Opened


class Reply(NamedTuple):
    """The coordinator's reply to a rank.

    Attributes:
        plan: the reply to the rank's plan; None if all ranks must send their parts.
        layout: the rank's part of the target's layout.
        differing: description of the values that differ between ranks, if they were compared.
        is_on_hosts: see :attr:`Target.is_on_hosts`.
    """

    plan: bytes | None
    layout: bytes = b""
    differing: str = ""
    is_on_hosts: bool = False


class SaveRun:
    """One save on this rank. The methods follow the steps in the module's docstring.

    Args:
        target: the target of the save.
        ranks: the ranks that save together.
        plan: the plan of these ranks.
        check_replicas: see :func:`torch_ckpt.save`.
        begun: when the caller requested the save, by ``time.perf_counter()``.
        snapshot: the state to save, if training continues meanwhile.
        is_blocking: the caller waits until the snapshot is staged.

    Attributes:
        metrics: durations and sizes of the save on this rank; final when the save has ended.
        differing: description of the values that differ between ranks; empty if none differs.
        caller_error: error with which the save fails as soon as it begins; None unless its caller
            has failed.
    """

    def __init__(
        self,
        target: Target,
        ranks: Exchange,
        plan: AgreedPlan,
        check_replicas: str,
        begun: float,
        *,
        snapshot: SaveState | None = None,
        is_blocking: bool = True,
    ) -> None:
        self.differing = ""
        self.caller_error: BaseException | None = None
        self._target = target
        target.timeout = ranks.timeout
        self._ranks = ranks
        self._plan = plan
        self._check_replicas = check_replicas
        self._begun = begun
        self.metrics = SaveMetrics(path=target.path, rank=ranks.rank)
        self._is_blocking = is_blocking
        # Set while the save runs, because they may refer to the object that runs it.
        self._on_staged: Callable[[], object] | None = None
        self._on_committed: Callable[[bytes, list[Written]], object] | None = None
        self._state = snapshot
        self._opened: Opened | None = None
        self._written: list[Written] = []  # on the coordinator, until the commit is reported
        watch = None if snapshot is None else snapshot.watch
        self._write = _C.Save(watch)
        # The sources on CUDA devices are complete after these events.
        self._ready: Events = () if watch is None else record_events(watch.devices)

    def run(
        self,
        state_dict: StateDict | Callable[[], StateDict] | None = None,
        on_staged: Callable[[], object] | None = None,
        on_committed: Callable[[bytes, list[Written]], object] | None = None,
    ) -> Checkpoint:
        """Saves a state dict.

        Args:
            state_dict: see :func:`torch_ckpt.save`; None saves the snapshot.
            on_staged: called on each rank when the sources may change.
            on_committed: called on the coordinator after the commit, with the seal of the metadata
                and the results of the writes. The other ranks wait until it returns.

        Raises:
            CheckpointException: on every rank, with the cause of each rank that failed.
        """
        ranks = self._ranks
        self._on_staged, self._on_committed = on_staged, on_committed
        try:
            reply, _ = ranks.exchange("plan", lambda: self._describe(state_dict), self._assign)
            if reply.plan is None:
                again = lambda: (self._message(with_parts=True), None)  # noqa: E731
                reply, _ = ranks.exchange("plan", again, self._assign)
            with ranks.alive(self.moved):
                write = lambda: self._write_items(reply)  # noqa: E731
                seal, _ = ranks.exchange("write", write, self._commit, self._target.undo)
                if reply.is_on_hosts:
                    seal = self._complete(seal)
        finally:
            self._end()
        return Checkpoint(self._target.path, self.metrics, seal, self._target.read_options)

    def progress(self) -> Progress:
        """Returns the progress of this rank's write, in bytes."""
        return progress_of(self._write)

    def moved(self) -> int:
        """Returns a number that changes while the save makes progress."""
        resolved = 0 if self._state is None else self._state.resolved
        _planned, staged, done, *_files = self._write.progress()
        moved = staged + done + resolved + self._target.bytes_moved
        return moved + (time.monotonic_ns() if self._target.is_busy else 0)

    # --- 1. the description ----------------------------------------------------------------------

    def _describe(
        self, state_dict: StateDict | Callable[[], StateDict] | None
    ) -> tuple[Message, None]:
        if self.caller_error is not None:
            raise self.caller_error
        if state_dict is not None:
            self._state = SaveState(States(state_dict, calls=True).saved())
        state = self._state
        assert state is not None
        self.metrics.state_bytes = self._target.expected_bytes = state.tensor_bytes
        self._target.select(state)
        state.plan()
        self._opened = self._target.open(self._ranks.rank, self._ranks.size)
        return self._message(), None

    def _message(self, with_parts: bool = False) -> Message:
        """Returns this rank's message.

        Args:
            with_parts: the coordinator has asked for this rank's parts.
        """
        state, ranks = self._state, self._ranks
        assert state is not None
        assert self._opened is not None
        fingerprints = None
        if self._check_replicas != "off" and ranks.size > 1:
            with self._device_streams():
                fingerprints = state.fingerprints(self._check_replicas)
        template, message = self._plan.own.message(state.structure, fingerprints, with_parts)
        shared = None if template is None else ranks.share(template)
        return Message(shared, message, self._opened)

    # --- 2. the assignment, on the coordinator ---------------------------------------------------

    def _assign(self, messages: list[Message]) -> Answers[Reply]:
        """Returns the replies, indexed by rank. Equal replies are one object, which is sent only
        once."""
        shared = self._ranks.shared
        replies = self._plan.coordinator.assign(
            [(None if one.template is None else shared(one.template), one.plan) for one in messages]
        )
        if not replies:
            return Answers([Reply(None)] * len(messages))
        differing = self._compare_replicas()
        target = self._target
        layouts = target.lay_out(self._plan, [one.opened for one in messages])
        made: dict[Reply, Reply] = {}
        return Answers(
            made.setdefault(reply, reply)
            for plan, layout in zip(replies, layouts, strict=True)
            for reply in [Reply(plan, layout, differing, target.is_on_hosts)]
        )

    def _compare_replicas(self) -> str:
        """Returns a description of the values that differ between ranks, or an empty string."""
        if self._check_replicas == "off" or self._ranks.size == 1:
            return ""
        differing = self._plan.coordinator.differing_replicas()
        if not differing:
            return ""
        text = description_of(differing)
        if self._check_replicas == "error":
            raise CheckpointError(text)
        warn(f"{self._target.path}: {text}")
        return text

    # --- 3. the write ----------------------------------------------------------------------------

    def _write_items(self, reply: Reply) -> tuple[Written, Written]:
        """Writes the items of this rank, and completes the files."""
        state, target, own, metrics = self._state, self._target, self._plan.own, self.metrics
        assert state is not None
        assert reply.plan is not None
        try:
            own.accept(state.structure, reply.plan)
            self.differing = reply.differing
            with self._device_streams():
                # First, because other ranks may wait for the connections of this rank.
                files = target.files(state, own.items, reply.layout)
                # The ranks may have chosen another place in the meantime.
                metrics.path = target.path
                checksums = b""
                if own.copies:
                    with target.busy():
                        checksums = state.checksums(own.copies)
            metrics.planning_s = time.perf_counter() - self._begun
            is_snapshot = state.watch is not None
            written = write_files(
                self._write,
                *files,
                target.engine_options,
                title=f"save {os.path.basename(target.path)}",
                rank=self._ranks.rank,
                ranks=self._ranks.size,
                is_snapshot=is_snapshot,
                background=target.options.background if is_snapshot else None,
                # Normal priority if the caller waits for the copies.
                low_priority_copies=not self._is_blocking,
                ready=self._ready,
                advice=_ADVICE,
                on_staged=self._release,
            )
            if checksums:
                written.checksums = checksums
            try:
                target.written()
            except BaseException:
                target.undo(written)
                raise
            metrics.written_s = time.perf_counter() - self._begun
            return written, written
        except BaseException:
            target.stop()
            raise

    def _release(self) -> None:
        """Releases the values, which have been or will be copied, and encodes the metadata on the
        coordinator. The engine writes meanwhile."""
        assert self._state is not None
        self._state.release()
        if self._on_staged is not None:
            self._on_staged()
        if self._ranks.is_coordinator:
            self._plan.coordinator.describe()

    @contextlib.contextmanager
    def _device_streams(self) -> Iterator[None]:
        """Block whose device work runs in side streams, after all work submitted before the
        call."""
        with contextlib.ExitStack() as stack:
            streams = []
            for event, device in self._ready:
                stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                stream.wait_event(event)
                stack.enter_context(torch.cuda.stream(stream))
                streams.append((stream, device))
            yield
            self._ready = [(stream.record_event(), device) for stream, device in streams]

    # --- 4. the commit, on the coordinator -------------------------------------------------------

    def _commit(self, written: list[Written]) -> bytes:
        """Returns the result of :meth:`Target.commit`."""
        differing = self._plan.coordinator.differing_copies([one.checksums for one in written])
        if differing:
            raise CheckpointError(text_of_copies(differing))
        answer = self._target.commit(self._plan, written)
        if self._target.is_on_hosts:
            self._written = written
        elif self._on_committed is not None:
            self._on_committed(answer, written)
        return answer

    def _complete(self, answer: bytes) -> bytes:
        """Completes the save on all ranks. Returns the seal of the metadata."""
        seal = self._target.seal_of(answer)

        def publish() -> tuple[None, None]:
            self._target.publish_on_host(answer)
            return None, None

        # With a function that undoes, a coordinator that was declared dead does not go on.
        self._ranks.exchange("publish", publish, lambda _none: None, lambda _none: None)
        self._target.is_completed = True

        def report(_none: list[None]) -> None:
            if self._on_committed is not None:
                self._on_committed(seal, self._written)

        self._ranks.exchange("report", lambda: (None, None), report)
        return seal

    # --- the end ---------------------------------------------------------------------------------

    def _end(self) -> None:
        """Releases what the save still holds, and completes the metrics."""
        self._target.discard()
        self._write.finish()
        if self._state is not None:
            self._state.release()
        self._ready = ()
        self._on_staged = self._on_committed = None
        metrics = self.metrics
        metrics.total_s = time.perf_counter() - self._begun
        if metrics.written_s:
            metrics.commit_s = metrics.total_s - metrics.written_s
        metrics.messages, metrics.message_bytes = self._ranks.sent
        metrics.bytes = self._write.progress()[0]
        staged, _ended, _stage, checksum, write, fsync = self._write.timing()
        metrics.staging_s, metrics.checksum_s = staged, checksum
        metrics.write_s, metrics.fsync_s = write, fsync
