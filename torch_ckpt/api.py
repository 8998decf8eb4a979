"""``save``, ``async_save`` and ``load``: as torch's, with less Python for each tensor.

The files are the same. What differs is the way there: a plain tensor is one short tuple in a plan
instead of some ten objects, plans and results travel between ranks in that form (saving.py), and a
load needs no exchange of plans at all. Everything that is not a plain tensor (DTensor,
ShardedTensor, objects) goes through torch's own planners.
"""

from __future__ import annotations

import copy
import functools
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from torch_ckpt.collector import no_gc
from torch_ckpt.coordination import Meeting, Ranks
from torch_ckpt.reader import FileSystemReader, Row
from torch_ckpt.saving import PlanCache, StateDict, save_state, tell_the_others
from torch_ckpt.snapshot import AsyncSave, Job, alone, check_for_errors, spawn, start
from torch_ckpt.sources import Sources
from torch_ckpt.writer import FileSystemWriter

CheckpointId = str | os.PathLike[str]


def save(
    state_dict: StateDict,
    checkpoint_id: CheckpointId | None = None,
    *,
    storage_writer: FileSystemWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    **writer_options: Any,
) -> Metadata:
    """Saves a state dict; returns when it is durable and visible on all ranks.

    Args:
        state_dict: as for ``dcp.save``: nested dicts and lists of tensors, DTensors, objects that
            pickle, and ``Stateful`` values at the top.
        checkpoint_id: directory of the checkpoint.
        storage_writer: a writer to use, in the place of one made for ``checkpoint_id``.
        planner: a planner of the caller's own; the save then is ``dcp.save`` with our writer.
        process_group: the ranks that save together; the default group if None.
        no_dist: save from this process alone.
        writer_options: passed to :class:`FileSystemWriter`.

    Returns:
        The checkpoint's metadata, on every rank.

    Raises:
        CheckpointException: on every rank, with the cause of each rank that failed: ``OSError`` for
            failed system calls, ``NotCommitted`` or ``DurabilityUncertain`` for a failed commit.
        ValueError: contradicting options.
    """
    ranks = Ranks(process_group, no_dist)
    writer = _made(FileSystemWriter, storage_writer, checkpoint_id, writer_options)
    with alone():
        # An unseen error of an earlier save is not raised here: other ranks may have seen theirs,
        # and would wait in the process group for this one.
        return _save_now(state_dict, writer, checkpoint_id, planner, process_group, ranks)


def _save_now(
    state_dict: StateDict,
    writer: FileSystemWriter,
    checkpoint_id: CheckpointId | None,
    planner: SavePlanner | None,
    process_group: dist.ProcessGroup | None,
    ranks: Ranks,
) -> Metadata:
    writer.reset(checkpoint_id)
    if planner is not None or not writer.engine_can_write():
        metadata: Metadata = dcp_save(
            state_dict,
            storage_writer=writer,
            planner=planner,
            process_group=process_group,
            no_dist=not ranks.distributed,
        )
        return metadata
    return save_state(lambda: _values_of(state_dict), writer, ranks)


def async_save(
    state_dict: StateDict,
    checkpoint_id: CheckpointId | None = None,
    *,
    staging: str = "blocking",
    storage_writer: FileSystemWriter | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    if_busy: str = "wait",
    timeout: float = 300.0,
    write_done: Callable[[], None] | None = None,
    on_commit: Callable[[Metadata], None] | None = None,
    warn_unchanged: bool = True,
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
        storage_writer: a writer to use, in the place of one made for ``checkpoint_id``. Its
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
        on_commit: called on the coordinator, in the save's thread, after the commit.
        warn_unchanged: warn where weights or optimizer states are those of the last save although
            a step counter has moved.
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
    if staging not in ("blocking", "overlapped"):
        raise ValueError(f'staging must be "blocking" or "overlapped", got {staging!r}')
    if if_busy not in ("wait", "raise"):
        raise ValueError(f'if_busy must be "wait" or "raise", got {if_busy!r}')
    writer = _made(FileSystemWriter, storage_writer, checkpoint_id, writer_options)
    if not writer.engine_can_write():
        raise ValueError(
            "async_save writes local files without _extensions; use dcp.async_save with this writer"
        )
    # Before anything can fail: the ranks count their saves alike.
    meeting = Meeting.of(process_group, no_dist)
    plans = PlanCache.of(meeting)
    ranks = meeting.ranks(timeout)
    job: Job | None = None
    try:
        with alone(if_busy):
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
                str(writer.path),
                background=writer.background,
                blocking=staging == "blocking",
                begun=begun,
                trace=trace,
                write_done=write_done,
                on_commit=on_commit,
                warn_unchanged=warn_unchanged,
            )
            handle = start(job, lambda job: save_state(job.values, writer, ranks, job, plans))
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
            job.wait_until_staged()
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
    **reader_options: Any,
) -> None:
    """Loads a checkpoint into a state dict, in place; any sharding into any other.

    Args:
        state_dict: as for ``dcp.load``: its tensors receive the values, other values are replaced.
        checkpoint_id: directory of the checkpoint.
        storage_reader: a reader to use, in the place of one made for ``checkpoint_id``.
        planner: a planner of the caller's own; the load then is ``dcp.load`` with our reader.
        process_group: the ranks that load together; the default group if None.
        no_dist: load in this process alone.
        reader_options: passed to :class:`FileSystemReader`.

    Raises:
        CheckpointException: on every rank, with the cause of each rank that failed: ``Corrupt``,
            ``Unsafe``, ``OSError``, or what torch raises for names and shapes that do not fit.
        ValueError: contradicting options.
    """
    ranks = Ranks(process_group, no_dist)
    reader = _made(FileSystemReader, storage_reader, checkpoint_id, reader_options)
    reader.reset(checkpoint_id)
    if planner is not None:
        dcp_load(
            state_dict,
            storage_reader=reader,
            planner=planner,
            process_group=process_group,
            no_dist=not ranks.distributed,
        )
        return
    # state_dict() of a Stateful may be collective, so every rank asks in the same order.
    keys = sorted(state_dict)
    values = {key: _value_of(state_dict[key]) for key in keys}
    ranks.all_succeed("load", lambda: _load(values, reader, ranks))
    for key in keys:
        if _is_stateful(state_dict[key]):
            state_dict[key].load_state_dict(values[key])
        else:
            state_dict[key] = values[key]


# --- loading -------------------------------------------------------------------------------------


class _RestPlanner(DefaultLoadPlanner):
    """torch's planner over the part of the state dict that is left for it."""

    def plan_rest(self, rest: StateDict) -> LoadPlan:
        before = self.state_dict, self.flatten_state_dict
        # Flattening has been done. Left on, torch would take the names that are not in this part
        # for missing, and the checkpoint for one of torch 2.3.
        self.state_dict, self.flatten_state_dict = rest, False
        try:
            return self.create_local_plan()
        finally:
            self.state_dict, self.flatten_state_dict = before


def _load(values: StateDict, reader: FileSystemReader, ranks: Ranks) -> None:
    metadata = _read_metadata(reader, ranks.rank)
    planner = _RestPlanner()
    planner.set_up_planner(values, metadata, ranks.is_coordinator)
    reader.set_up_for_load(metadata, ranks.rank)
    if any(name not in metadata.state_dict_metadata for name in planner.state_dict):
        # A checkpoint of torch 2.3, whose names torch's planner knows, or really not there.
        reader.read_items(planner.create_local_plan().items, planner)
        return
    files: dict[str, int] = {}
    rows: list[Row] = []
    rest: StateDict = {}
    with no_gc():
        for name, target in planner.state_dict.items():
            if not _plan_plain(name, target, reader, metadata, files, rows):
                rest[name] = target
        # First what may be refused: nothing has been changed when names or shapes do not fit.
        rest_plan = planner.plan_rest(rest) if rest else None
    reader.read_rows(list(files), rows)
    if rest_plan is not None:
        reader.read_items(rest_plan.items, planner)


def _read_metadata(reader: FileSystemReader, rank: int) -> Metadata:
    """The common metadata, or this rank's own where ranks saved without collectives."""
    try:
        return reader.read_metadata()
    except FileNotFoundError:
        try:
            return reader.read_metadata(rank=rank)
        except FileNotFoundError:
            pass
        raise


def _plan_plain(
    name: str,
    target: Any,
    reader: FileSystemReader,
    metadata: Metadata,
    files: dict[str, int],
    rows: list[Row],
) -> bool:
    """Adds the rows that fill a plain tensor; False where torch's planner must look at it."""
    if type(target) not in (torch.Tensor, torch.nn.Parameter):
        return False
    stored = metadata.state_dict_metadata.get(name)
    if type(stored) is not TensorStorageMetadata or stored.size != target.size():
        return False
    whole = target.detach()
    dtype = stored.properties.dtype
    found = []
    for chunk in stored.chunks:
        info = reader.storage_data.get(MetadataIndex(name, chunk.offsets))
        if info is None or info.transform_descriptors:
            return False
        part = whole
        if chunk.sizes != stored.size:
            for dim, (offset, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                part = part.narrow(dim, offset, length)
        number = files.setdefault(info.relative_path, len(files))
        found.append((name, number, info.offset, info.length, dtype, chunk.sizes, (), (), part))
    rows.extend(found)
    return True


# --- both ----------------------------------------------------------------------------------------


def _made(kind: Any, given: Any, checkpoint_id: CheckpointId | None, options: StateDict) -> Any:
    """The writer or reader to use."""
    if given is None:
        if checkpoint_id is None:
            raise ValueError(f"pass a checkpoint_id or a {kind.__name__}")
        return kind(checkpoint_id, **options)
    if options:
        raise ValueError(f"{sorted(options)} belong to the {kind.__name__} that was passed")
    if not isinstance(given, kind):
        raise ValueError(f"expected a torch_ckpt.{kind.__name__}, got {type(given).__name__}")
    return given


def _is_stateful(value: Any) -> bool:
    """As isinstance(value, Stateful), which takes 20 microseconds before Python 3.12."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _values_of(state_dict: StateDict) -> StateDict:
    return {key: _value_of(value) for key, value in state_dict.items()}


def _value_of(value: Any) -> Any:
    return value.state_dict() if _is_stateful(value) else value
