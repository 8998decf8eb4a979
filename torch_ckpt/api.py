"""``save``, ``async_save`` and ``load``: as torch's, with less Python for each tensor.

The files are the same, but for values at the top that have a state, such as modules and optimizers:
state/app_state.py reads and sets them. What differs is the way there: a plain tensor is one short
tuple in a plan instead of some ten objects, plans and results travel between ranks in that form
(saving/session.py), and a load (loading/load.py) needs no exchange of plans at all. Everything that
is not a plain tensor (DTensor, ShardedTensor, objects) goes through torch's own planners.
"""

from __future__ import annotations

import copy
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from torch_ckpt._base.cycle_collector import no_gc
from torch_ckpt._base.options import names_of, options_of, refuse_unknown, require_choice
from torch_ckpt._base.stateful import is_stateful
from torch_ckpt.loading.load import Load, Strict
from torch_ckpt.loading.reader import FileSystemReader
from torch_ckpt.loading.renaming import Rename
from torch_ckpt.loading.report import LoadReport, Names, ReadMemory
from torch_ckpt.ranks.failures import CheckpointFailed, raised_as_ours
from torch_ckpt.ranks.meeting import TIMEOUT_SECONDS, Meeting, Ranks
from torch_ckpt.saving.async_save import AsyncSave
from torch_ckpt.saving.job import Job
from torch_ckpt.saving.plan import StateDict
from torch_ckpt.saving.replica_check import MODES as REPLICA_CHECKS
from torch_ckpt.saving.running_saves import alone, check_for_errors, spawn, start
from torch_ckpt.saving.session import PlanCache, save_state, tell_the_others
from torch_ckpt.saving.sources import Sources
from torch_ckpt.saving.writer import FileSystemWriter
from torch_ckpt.state.app_state import saved_values
from torch_ckpt.state.values import Targets, estimate, load_values, load_values_freeing

CheckpointId = str | os.PathLike[str]


def save(
    state_dict: StateDict | Callable[[], StateDict],
    checkpoint_id: CheckpointId | None = None,
    *,
    storage_writer: FileSystemWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    timeout: float = TIMEOUT_SECONDS,
    check_replicas: str = "warn",
    **writer_options: Any,
) -> Metadata:
    """Saves a state dict; returns when it is durable and visible on all ranks.

    All ranks must call it, and :func:`async_save`, in the same order. They communicate through the
    process group's store, where a rank that has died or hangs is noticed and named.

    Args:
        state_dict: as for ``dcp.save``: nested dicts and lists of tensors, DTensors and objects
            that pickle. At the top also modules, optimizers, schedulers, :class:`PerRank` and other
            values with a state, which are saved as :class:`AppState` saves them. Or a function that
            returns one: what it raises fails the save on all ranks at once.
        checkpoint_id: directory of the checkpoint; URLs are for :class:`CheckpointManager` and
            ``torch_ckpt.training``.
        storage_writer: a writer to use, instead of one made for ``checkpoint_id``.
        planner: a planner of the caller's own; the save then is ``dcp.save`` with our writer, and
            values with a state are in DCP's layout.
        process_group: the ranks that save together; the default group if None.
        no_dist: save from this process alone.
        timeout: seconds after which a rank that shows no sign of life fails the save on all others.
        check_replicas: what to do if a plain tensor (no DTensor), a number or another object that
            several ranks have under one name, of which one rank's is saved, differs between ranks:
            "off", "warn", or "error", which saves nothing. "warn" reads all bytes of tensors up to
            64 KiB, and 64 KiB spread evenly over larger ones; "error" reads all bytes. Objects are
            compared by their pickles. Not with a ``planner``.
        writer_options: passed to :class:`FileSystemWriter`.

    Returns:
        The checkpoint's metadata, on every rank. Large metadata is with rank 0; the others read it
        in ``path`` when they look at it, which another save there may have replaced by then.

    Raises:
        CheckpointException: on every rank, with the cause of each rank that failed: ``OSError`` for
            failed system calls, ``NotCommitted`` or ``DurabilityUncertain`` for a failed commit,
            ``CheckpointError`` for replicas that differ.
        ValueError: contradicting options.
    """
    # Before anything can fail: the ranks count their saves alike.
    meeting = Meeting.of(process_group, no_dist)
    plans = PlanCache.of(meeting)
    ranks = meeting.ranks(timeout)
    try:
        with ExitStack() as stack:
            with _telling_the_others(ranks):
                require_choice("check_replicas", check_replicas, REPLICA_CHECKS)
                writer = _made(
                    save, FileSystemWriter, storage_writer, checkpoint_id, writer_options
                )
                # An unseen error of an earlier save is not raised here: other ranks may have seen
                # theirs.
                stack.enter_context(alone(ranks=ranks))
                writer.reset(checkpoint_id)
            stack.push(_closing(ranks, timeout))
            # dcp.save does not tell a writer that the save has failed.
            stack.callback(writer.abandon)
            if planner is None and writer.engine_can_write():
                values = functools.partial(_values_of, state_dict)
                return save_state(values, writer, ranks, plans, check_replicas)
            with raised_as_ours(ranks.rank):
                metadata: Metadata = dcp_save(
                    _given(state_dict),
                    storage_writer=writer,
                    planner=planner,
                    process_group=process_group,
                    no_dist=not ranks.distributed,
                )
            return metadata
    except CheckpointFailed as error:
        # Its causes have frames of their own; how they came here tells nobody anything.
        raise error.with_traceback(None) from error.__cause__


def async_save(
    state_dict: StateDict | Callable[[], StateDict],
    checkpoint_id: CheckpointId | None = None,
    *,
    staging: str = "blocking",
    storage_writer: FileSystemWriter | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    if_busy: str = "wait",
    timeout: float = TIMEOUT_SECONDS,
    write_done: Callable[[], None] | None = None,
    on_commit: Callable[[Metadata], None] | None = None,
    warn_unchanged: bool = True,
    check_replicas: str = "warn",
    trace: str | os.PathLike[str] | None = None,
    **writer_options: Any,
) -> AsyncSave:
    """Saves a snapshot of a state dict while training goes on.

    All ranks must call it in the same order. They communicate in the background, and never over a
    process group.

    Args:
        state_dict: as for :func:`save`.
        checkpoint_id: directory of the checkpoint.
        staging: "blocking" returns once everything has been copied to host memory, and the sources
            may change. "overlapped" returns at once; the sources must not change before ``staged``:
            see :meth:`AsyncSave.guard`. A change that is noticed fails the save with
            :class:`SourceChanged`, on all ranks.
        storage_writer: a writer to use, instead of one made for ``checkpoint_id``. Its
            ``max_host_bytes`` bounds the snapshot's memory; below the state's size the save goes in
            waves, and ``staged`` comes later. None: half of the free memory of the machine, shared
            by its ranks.
        process_group: the ranks that save together; the default group if None. Only its members
            are looked up; it is never communicated over.
        no_dist: save from this process alone.
        if_busy: "wait" waits for this process's save under way; "raise" raises CheckpointError.
        timeout: seconds after which a rank that shows no sign of life fails the save on all others.
        write_done: called on each rank, in the save's thread, when its files are durable. What it
            raises fails the save.
        on_commit: called on the coordinator, in the save's thread, after the commit. The save ends
            when it has ended, on all ranks; what it raises is raised on all, as OnCommitFailed.
        warn_unchanged: warn where weights or optimizer states are those of the last save although
            a step counter has moved.
        check_replicas: as for :func:`save`; looked at before the sources may change.
        trace: a file for a trace of the save, for chrome://tracing or Perfetto; with several ranks
            ``-rank{n}`` is added to its name.
        writer_options: passed to :class:`FileSystemWriter`; ``background`` among them sets
            threads, priorities and bandwidth.

    Returns:
        The handle. Keep it: one that is dropped before the save has ended warns.

    Raises:
        CheckpointException: that of an earlier background save which nobody has seen.
        CheckpointError: ``if_busy="raise"`` and a save is under way.
        ValueError: contradicting options.
    """
    begun = time.perf_counter()
    # Before anything can fail: the ranks count their saves alike.
    meeting = Meeting.of(process_group, no_dist)
    plans = PlanCache.of(meeting)
    ranks = meeting.ranks(timeout)
    job: Job | None = None
    try:
        require_choice("staging", staging, ("blocking", "overlapped"))
        require_choice("check_replicas", check_replicas, REPLICA_CHECKS)
        require_choice("if_busy", if_busy, ("wait", "raise"))
        writer = _made(async_save, FileSystemWriter, storage_writer, checkpoint_id, writer_options)
        if not writer.engine_can_write():
            raise ValueError(
                "async_save writes local files without _extensions; use dcp.async_save with this "
                "writer"
            )
        with alone(if_busy, ranks=ranks):
            check_for_errors()
            if storage_writer is not None:
                # The caller may use it for something else while this save goes on.
                writer = copy.copy(writer)
                writer.reset(checkpoint_id)
            with no_gc():
                sources = Sources(_values_of(state_dict))
            job = Job(
                sources,
                ranks,
                writer.destination,
                background=writer.background,
                blocking=staging == "blocking",
                begun=begun,
                trace=trace,
                write_done=write_done,
                on_commit=on_commit,
                warn_unchanged=warn_unchanged,
            )
            job.reported = writer.reported_elsewhere

            def run(job: Job) -> Metadata:
                try:
                    return save_state(job.values, writer, ranks, plans, check_replicas, job)
                finally:
                    writer.abandon()

            handle = start(job, run)
    except BaseException as error:
        # The other ranks are told by whoever has the job, or they would wait for this one.
        if job is None or job.take():
            spawn(functools.partial(tell_the_others, ranks, error))
        else:
            job.abandon(error)
        raise
    try:
        if staging == "blocking":
            job.go()
            job.write.wait_staged()
        job.metrics.blocked_s = time.perf_counter() - begun
        return handle
    finally:
        # Last, since the thread takes the interpreter from this one.
        job.go()


def load(
    state_dict: StateDict,
    checkpoint_id: CheckpointId | None = None,
    *,
    storage_reader: FileSystemReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    strict: Strict = True,
    names: Names = None,
    rename: Rename = None,
    free_before_read: bool = False,
    timeout: float = TIMEOUT_SECONDS,
    **reader_options: Any,
) -> LoadReport | None:
    """Loads a checkpoint into a state dict, in place; any sharding into any other.

    Before anything changes, names, shapes and dtypes of the whole are compared: see ``strict``.

    Args:
        state_dict: as for ``dcp.load``: its tensors receive the values, other values are replaced.
            Modules, optimizers and other values with a state at the top are restored as by
            :class:`AppState`, also an optimizer that has not made a step.
        checkpoint_id: directory of the checkpoint; or ``ROOT/40`` for step 40 of a run, or ROOT for
            its newest complete step, which is not deleted during the load.
        storage_reader: a reader to use, instead of one made for ``checkpoint_id``.
        planner: a planner of the caller's own; the load then is ``dcp.load`` with our reader, and
            the last four options do not go with it. So it is with a reader for a file system that
            is not local.
        process_group: the ranks that load together; the default group if None.
        no_dist: load in this process alone.
        strict: raise LoadMismatch where something in the state dict is missing in the checkpoint,
            or has another shape there. "dtypes": or another dtype. False: load what fits, and warn
            of what is skipped; a dict or ``Stateful`` value of which nothing fits is refused all
            the same.
        names: which of the state dict's fully qualified names to load: patterns as of
            :mod:`fnmatch` (``["model.*"]``), or a function of the name. None: all.
        rename: for a checkpoint with other names, as that of another model to be fine-tuned: gives
            each of its fully qualified names the one that the state dict has. Pairs of old and new
            names, as a mapping or in their order, in which ``*`` stands for any text
            (``{"encoder.*": "model.encoder.*"}``; the first that matches counts), or a function of
            the old name. ``names`` and reports have the new names.
        free_before_read: for a state that fits into memory only once: values are loaded key by key,
            and each object is deleted before its replacement is read. Tensors are loaded in place,
            as always. After a failure the objects are lost.
        timeout: seconds after which a rank that gives no sign of life is given up: the load fails
            on all ranks and names it. A rank that reads gives signs of life for as long as bytes
            move.
        reader_options: passed to :class:`FileSystemReader`.

    Returns:
        How this rank's state dict and the checkpoint compare; None after a ``dcp.load``.

    Raises:
        CheckpointException: on every rank, with the cause of each rank that failed:
            ``LoadMismatch``, ``Corrupt``, ``Unsafe``, ``OSError``; ``TimeoutError`` for one that
            was silent.
        ValueError: contradicting options.
    """
    # Before anything can fail: the ranks count their loads alike.
    ranks = Meeting.of(process_group, no_dist).ranks(timeout, kind="load")
    try:
        with ExitStack() as stack:
            with _telling_the_others(ranks):
                _require_dict(state_dict)
                reader = _made(
                    load, FileSystemReader, storage_reader, checkpoint_id, reader_options
                )
                is_by_dcp = planner is not None or not reader.engine_can_read()
                is_plain = strict and names is None and rename is None and not free_before_read
                if is_by_dcp and not is_plain:
                    raise ValueError(
                        "strict, names, rename and free_before_read do not go with a planner, nor "
                        "with a file system that is not local"
                    )
                if is_by_dcp:
                    _require_states(state_dict)
                if free_before_read and reader.read_once:
                    raise ValueError("free_before_read and read_once do not go together")
                reader.reset(checkpoint_id)
            stack.push(_closing(ranks, timeout))
            stack.callback(reader.release)
            if is_by_dcp:
                reader.process_group = process_group
                with raised_as_ours(ranks.rank):
                    dcp_load(
                        state_dict,
                        storage_reader=reader,
                        planner=planner,
                        process_group=process_group,
                        no_dist=not ranks.distributed,
                    )
                return None
            one_load = Load(reader, ranks, names, rename)
            if free_before_read:
                report = load_values_freeing(state_dict, one_load, ranks, strict=strict)
            else:
                report = load_values(
                    state_dict, one_load, ranks, strict=strict, process_group=process_group
                )
            reader.lost_precision.warn()
            return report
    except CheckpointFailed as error:
        # As in save.
        raise error.with_traceback(None) from error.__cause__


#: Options of :func:`load` for a caller that chooses the checkpoint and the ranks.
LOAD_OPTIONS = (names_of(load) | options_of(FileSystemReader)) - {
    "state_dict",
    "checkpoint_id",
    "storage_reader",
    "process_group",
    "no_dist",
}


def preflight(
    state_dict: StateDict,
    checkpoint_id: CheckpointId,
    *,
    names: Names = None,
    rename: Rename = None,
    **reader_options: Any,
) -> LoadReport:
    """Compares a state dict with a checkpoint, as :func:`load` does first. Reads only metadata.

    Args:
        state_dict, names, rename, reader_options: as for :func:`load`.

    Raises:
        FileNotFoundError, Unsafe, Corrupt: the metadata cannot be read.
        ValueError: ``rename`` matches nothing, or gives two names the same one.
    """
    with _alone(checkpoint_id, names, rename, reader_options) as load:
        return load.compare(Targets(_given(state_dict), only_compared=True).of_all(load))


def estimate_read_memory(
    state_dict: StateDict,
    checkpoint_id: CheckpointId,
    *,
    names: Names = None,
    rename: Rename = None,
    **reader_options: Any,
) -> ReadMemory:
    """The memory that :func:`load` takes on this rank. Reads the metadata alone.

    Args:
        state_dict, names, rename, reader_options: as for :func:`load`.

    Raises:
        FileNotFoundError, Unsafe, Corrupt: the metadata cannot be read.
        LoadMismatch: the checkpoint does not fit the state dict.
    """
    with _alone(checkpoint_id, names, rename, reader_options) as load:
        return estimate(load, _given(state_dict))


@contextmanager
def _alone(
    checkpoint_id: CheckpointId, names: Names, rename: Rename, reader_options: StateDict
) -> Iterator[Load]:
    """For what this rank asks for itself."""
    reader = FileSystemReader(checkpoint_id, **reader_options)
    try:
        yield Load(reader, Ranks(), names, rename)
    finally:
        reader.release()


# --- both ----------------------------------------------------------------------------------------


@contextmanager
def _telling_the_others(ranks: Ranks) -> Iterator[None]:
    """What fails within it on this rank is raised here at once, and on the others at their first
    step."""
    try:
        yield
    except BaseException as error:
        spawn(functools.partial(tell_the_others, ranks, error))
        raise


def _closing(ranks: Ranks, timeout: float) -> Callable[..., None]:
    """Ends the meeting, at the end of an ExitStack."""

    def close(_kind: object, error: BaseException | None, _frames: object) -> None:
        # A rank that dies after its part is done is waited for no longer than others are. Who
        # interrupts a save or load that waits does not want to wait for the same ranks again.
        is_interrupted = isinstance(error, KeyboardInterrupt)
        ranks.close(1.0 if is_interrupted else min(timeout, 60.0))

    return close


def _made(
    caller: Callable[..., Any],
    kind: Any,
    given: Any,
    checkpoint_id: CheckpointId | None,
    options: StateDict,
) -> Any:
    """The writer or reader to use."""
    refuse_unknown(caller, kind, options)
    if checkpoint_id is not None and not os.fspath(checkpoint_id):
        raise ValueError("the checkpoint_id is empty; the current directory is '.'")
    if given is None:
        if checkpoint_id is None:
            raise ValueError(f"pass a checkpoint_id or a {kind.__name__}")
        return kind(checkpoint_id, **options)
    if options:
        raise ValueError(f"{sorted(options)} belong to the {kind.__name__} that was passed")
    if not isinstance(given, kind):
        raise ValueError(f"expected a torch_ckpt.{kind.__name__}, got {type(given).__name__}")
    return given


def _given(state_dict: StateDict | Callable[[], StateDict]) -> StateDict:
    """The state dict that the caller means.

    Raises:
        TypeError: it is another thing.
    """
    # A module can be called, too.
    if callable(state_dict) and not is_stateful(state_dict):
        state_dict = state_dict()
    _require_dict(state_dict)
    return cast(StateDict, state_dict)


def _require_dict(state_dict: object) -> None:
    if isinstance(state_dict, Mapping):
        return
    name = "model" if isinstance(state_dict, torch.nn.Module) else "state"
    wrapped = f"{{{name!r}: ...}}" if is_stateful(state_dict) else "a dict of names and values"
    raise TypeError(f"the state dict is a {type(state_dict).__name__}; pass {wrapped}")


def _require_states(state_dict: StateDict) -> None:
    """Raises ValueError if a value is an optimizer that ``dcp.load`` would leave without state."""
    for key, value in state_dict.items():
        if isinstance(value, torch.optim.Optimizer) and not value.state:
            raise ValueError(
                f"{key}: dcp.load, by which planners and file systems that are not local are "
                "served, loads nothing into an optimizer without state; load without a planner, or "
                "pass get_optimizer_state_dict(model, optimizer) of "
                "torch.distributed.checkpoint.state_dict"
            )


def _values_of(state_dict: StateDict | Callable[[], StateDict]) -> StateDict:
    return saved_values(_given(state_dict))
