"""``save``, ``async_save`` and ``load``: like torch's functions, with less Python per tensor.

They write and read the same files as ``dcp.save`` and ``dcp.load``, except for top-level values
with a ``state_dict``, such as modules and optimizers: state/states.py saves and restores these.
In a save, the engine plans, and ranks exchange plans and results in a compact form (saving/run.py).
In a load (loading/load.py), they exchange no plans.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from torch_ckpt._base.checks import require_choice
from torch_ckpt.checkpoint.opened import Checkpoint
from torch_ckpt.checkpoint.source import Source
from torch_ckpt.huggingface.model_target import Safetensors, refuse_model_options
from torch_ckpt.huggingface.object_model import model_target
from torch_ckpt.loading.load import LoadRun, Strict
from torch_ckpt.loading.load import load as load_from
from torch_ckpt.loading.renaming import Rename
from torch_ckpt.loading.report import LoadReport, Names, ReadMemory
from torch_ckpt.options import (
    DEFAULT_OPTIONS,
    DEFAULT_READ_OPTIONS,
    ReadOptions,
    WriteOptions,
    named_options,
    refuse_options,
)
from torch_ckpt.ranks.exchange import Exchange
from torch_ckpt.ranks.failures import reraise_torch_failures
from torch_ckpt.ranks.group import TIMEOUT_SECONDS, RankGroup
from torch_ckpt.saving import handle
from torch_ckpt.saving.handle import AsyncSave
from torch_ckpt.saving.object_target import checkpoint_target
from torch_ckpt.saving.replica_check import MODES as REPLICA_CHECKS
from torch_ckpt.saving.save_state import StateDict
from torch_ckpt.saving.target import CheckpointTarget, Target
from torch_ckpt.saving.writer import FileSystemWriter
from torch_ckpt.state.states import States

if TYPE_CHECKING:
    from typing_extensions import Never  # in typing since Python 3.11

CheckpointId: TypeAlias = str | os.PathLike[str]

#: "checkpoint" or "safetensors", or the options of safetensors files.
Format: TypeAlias = str | Safetensors


def save(
    state_dict: StateDict | Callable[[], StateDict],
    checkpoint_id: CheckpointId,
    *,
    format: Format = "checkpoint",
    options: WriteOptions = DEFAULT_OPTIONS,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    timeout: float = TIMEOUT_SECONDS,
    check_replicas: str = "warn",
    **removed: Never,
) -> Checkpoint:
    """Saves a state dict. Blocks until the checkpoint is durable and visible to all ranks.

    All ranks must call ``save`` and :func:`async_save` in the same order. The ranks communicate
    through the process group's store. If a rank dies or hangs, the save fails with an error that
    names the rank.

    Args:
        state_dict: the same as for ``dcp.save``: nested dicts and lists of tensors, DTensors and
            picklable objects. The top level can also contain modules, optimizers, schedulers,
            :class:`PerRank` and other objects with a ``state_dict`` method (docs/state.md). A
            function that returns such a dict is also accepted. If the function raises an exception,
            the save fails immediately on all ranks.
        checkpoint_id: path or URL of the checkpoint (docs/remote.md).
        format: "checkpoint", or "safetensors" for a directory of safetensors files in Hugging
            Face's layout, which can hold only tensors; or a :class:`Safetensors` with the options
            of such files.
        options: the options of the save.
        planner: the planner to use instead of the engine. The state dict is then saved by
            ``dcp.save`` with torch_ckpt's writer, and objects with a ``state_dict`` method are
            stored in DCP's layout.
        process_group: the ranks that save together; None means the default group.
        no_dist: save from this process only, without other ranks.
        timeout: a rank that sends no heartbeat for this many seconds is declared dead, and the save
            fails on all other ranks.
        check_replicas: what to do if replicas differ. Replicas are plain tensors (not DTensors),
            numbers and other objects that have the same name on several ranks; only one of these
            ranks saves its value. "off" compares nothing, "warn" warns, and "error" makes the save
            fail. "warn" compares tensors of up to 64 KiB in full, and samples 64 KiB spread evenly
            over each larger tensor; "error" compares all bytes. Objects are compared by their
            pickles. Not available with a ``planner``. DTensors of one name on several meshes are
            always compared in full, and fail the save if they differ (docs/async.md).
        removed: no keyword; the error for a former one names what replaces it.

    Returns:
        The checkpoint, on every rank.

    Raises:
        CheckpointException: the save failed; raised on every rank with the cause from each failed
            rank. The causes are ``OSError`` for a failed system call, ``NotCommitted`` or
            ``DurabilityUncertain`` for a failed commit, and ``CheckpointError`` for replicas that
            differ.
        ValueError: options contradict each other.

    Example::

        torch_ckpt.save({"model": model, "optimizer": optimizer, "step": 100}, "checkpoints/100")
        torch_ckpt.save(get_model_state_dict(model), "exports/final", format="safetensors")
    """
    group = RankGroup.of(process_group, no_dist)
    target = partial(target_of, save, checkpoint_id, format, options, removed)
    if planner is None:
        return handle.save(
            state_dict, target, group, timeout=timeout, check_replicas=check_replicas
        )
    ranks = Exchange.open(group, "save", timeout)
    with ExitStack() as stack:

        def prepare() -> tuple[FileSystemWriter, StateDict]:
            require_choice("check_replicas", check_replicas, REPLICA_CHECKS)
            if check_replicas == "error":
                raise ValueError('check_replicas="error" is not available with a planner')
            if not isinstance(target(), CheckpointTarget):
                raise ValueError('a planner can only save in the format "checkpoint"')
            writer = FileSystemWriter(checkpoint_id, **named_options(options))
            stack.enter_context(handle.saves.exclusive(ranks))
            return writer, States(state_dict, calls=True).values

        with ranks:
            # dcp.save would wait for a rank that fails before it calls dcp.save.
            writer, values = ranks.run("plan", prepare)
        # dcp.save does not notify a writer of a failed save.
        stack.callback(writer.abandon)
        with reraise_torch_failures(ranks.rank):
            dcp_save(
                values,
                storage_writer=writer,
                planner=planner,
                process_group=process_group,
                no_dist=not ranks.distributed,
            )
        read = ReadOptions(storage_options=options.storage_options)
        return Checkpoint(str(writer.path), options=read)


def async_save(
    state_dict: StateDict | Callable[[], StateDict],
    checkpoint_id: CheckpointId,
    *,
    staging: str = "blocking",
    format: Format = "checkpoint",
    options: WriteOptions = DEFAULT_OPTIONS,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    if_busy: str = "wait",
    timeout: float = TIMEOUT_SECONDS,
    on_commit: Callable[[Checkpoint], None] | None = None,
    warn_unchanged: bool = True,
    check_replicas: str = "warn",
    **removed: Never,
) -> AsyncSave:
    """Saves a snapshot of a state dict in the background, while training continues.

    All ranks must call this function in the same order. The ranks communicate from background
    threads through the process group's store, and never use the group's collectives.

    Args:
        state_dict: see :func:`save`.
        checkpoint_id: path or URL of the checkpoint.
        staging: "blocking" returns as soon as everything has been copied to host memory; the
            tensors can then safely be modified. "overlapped" returns immediately; do not modify the
            tensors until the handle's ``staged`` future is done (see :meth:`AsyncSave.guard`). If a
            modification is detected, the save fails on all ranks with :class:`SourceChanged`.
        format: see :func:`save`.
        options: the options of the save. Its ``max_host_bytes`` limits the memory for the snapshot.
            By default, half of the machine's free memory is divided equally among the ranks on the
            machine. A state that exceeds the limit is copied in several waves, so staging takes
            longer. Its ``background`` sets the threads, priorities and bandwidth of the save.
        process_group: the ranks that save together; None means the default group.
        no_dist: save from this process only, without other ranks.
        if_busy: what to do if another save of this process is still running: "wait" blocks until
            the running save has ended, and "raise" raises CheckpointError.
        timeout: a rank that sends no heartbeat for this many seconds is declared dead, and the save
            fails on all other ranks.
        on_commit: called on the coordinator with the checkpoint, in the save's thread, after the
            commit. The save does not end on any rank until the callback has returned. If the
            callback raises an exception, all ranks raise OnCommitFailed.
        warn_unchanged: warn if all tensors beneath a top-level key, such as ``model``, are the same
            as in the previous save although a number in the state, such as the step, has changed.
        check_replicas: see :func:`save`. Replicas are compared before the save counts as staged.
        removed: no keyword; the error for a former one names what replaces it.

    Returns:
        A handle to the save. Keep the handle until the save has ended; dropping the handle earlier
        causes a warning.

    Raises:
        CheckpointException: an earlier background save failed, and its error has not been reported
            yet.
        CheckpointError: another save is running, and ``if_busy`` is "raise".
        RuntimeError: the current stream captures a CUDA graph. The capture continues.
        ValueError: options contradict each other.

    Example::

        handle = torch_ckpt.async_save({"model": model, "step": 100}, "checkpoints/100")
        train_one_step()
        handle.result()  # waits until the checkpoint is durable and visible
    """
    return handle.start(
        state_dict,
        partial(target_of, async_save, checkpoint_id, format, options, removed),
        RankGroup.of(process_group, no_dist),
        staging=staging,
        if_busy=if_busy,
        timeout=timeout,
        on_commit=on_commit,
        warn_unchanged=warn_unchanged,
        check_replicas=check_replicas,
    )


def load(
    state_dict: StateDict,
    checkpoint_id: CheckpointId,
    *,
    options: ReadOptions = DEFAULT_READ_OPTIONS,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    strict: Strict = True,
    names: Names = None,
    rename: Rename = None,
    free_before_read: bool = False,
    timeout: float = TIMEOUT_SECONDS,
    **removed: Never,
) -> LoadReport | Checkpoint:
    """Loads a checkpoint into a state dict, in place. The checkpoint and the state dict can be
    sharded differently.

    The names, shapes and dtypes of the complete state dict are compared with the checkpoint before
    any value is changed. ``strict`` selects which differences are errors.

    Args:
        state_dict: the same as for ``dcp.load``. Tensors are filled in place; other values are
            replaced, and a stored tensor may replace a number or None. Modules, optimizers and
            other top-level objects with a ``state_dict`` method are restored, too (docs/state.md).
            An optimizer need not have any state yet.
        checkpoint_id: path or URL of the checkpoint; or ``ROOT/40`` for step 40 of a run; or ROOT
            for the newest complete step of the run. The step is not deleted during the load. Can
            also be a safetensors file, or a directory of safetensors files.
        options: the options of the reads.
        planner: the planner to use instead of the engine. The state dict is then loaded by
            ``dcp.load`` with torch_ckpt's reader, and ``strict=False``, ``names``, ``rename`` and
            ``free_before_read`` are not available.
        process_group: the ranks that load together; None means the default group.
        no_dist: load in this process only, without other ranks.
        strict: True raises LoadMismatch if a name of the state dict is missing from the checkpoint,
            or if a shape differs. "dtypes" also raises LoadMismatch if a dtype differs. False loads
            everything that fits and warns about everything else. Exception: if nothing can be
            loaded for one of the top-level dicts or ``Stateful`` values, LoadMismatch is raised.
        names: fully qualified names in the state dict to load: either :mod:`fnmatch` patterns, such
            as ``["model.*"]``, or a function that returns True for each name to load. None loads
            all names.
        rename: maps names in the checkpoint to names in the state dict, for example to fine-tune
            another model. Pass either a function that converts an old fully qualified name to a new
            one, or a mapping or sequence of (old, new) pairs. In a pair, ``*`` matches any text
            (``{"encoder.*": "model.encoder.*"}``). The first pair that matches applies. ``names``
            and the report use the new names.
        free_before_read: use this option if memory can hold only one copy of the state. The
            top-level keys are loaded one by one, and each object is deleted before its replacement
            is read. Tensors are loaded in place, as always. If the load fails, the deleted objects
            are lost.
        timeout: a rank that sends no heartbeat for this many seconds is declared dead, and the load
            fails on all ranks with an error that names the dead rank. While a rank reads, it sends
            heartbeats as long as bytes arrive.
        removed: no keyword; the error for a former one names what replaces it.

    Returns:
        A comparison of this rank's state dict with the checkpoint; the checkpoint if ``dcp.load``
        loaded the state dict.

    Raises:
        CheckpointException: the load failed; raised on every rank with the cause from each failed
            rank. The causes are ``LoadMismatch``, ``Corrupt``, ``Unsafe``, ``OSError``, and
            ``TimeoutError`` for a rank that sent no heartbeat.
        ValueError: options contradict each other.

    Example::

        state = {"model": model, "optimizer": optimizer, "step": 0}
        report = torch_ckpt.load(state, "checkpoints/100")
        print(state["step"], report.unexpected)
    """
    return load_from(
        state_dict,
        partial(source_of, load, checkpoint_id, options, removed),
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
        strict=strict,
        names=names,
        rename=rename,
        free_before_read=free_before_read,
        timeout=timeout,
    )


def open(checkpoint_id: CheckpointId, options: ReadOptions = DEFAULT_READ_OPTIONS) -> Checkpoint:
    """Opens a checkpoint, to list and read its values one by one.

    The directory stays open, with a shared lock, until the checkpoint is closed.

    Args:
        checkpoint_id: the checkpoint directory; or ``ROOT/40`` for step 40 of a run; or ROOT for
            the newest complete step of the run; or a safetensors file, or a directory with one such
            file or with several files and their index; or the URL of one of these.
        options: the options of the reads.

    Raises:
        FileNotFoundError: there is no committed checkpoint.
        Corrupt, Unsafe, CheckpointError, OSError: the metadata cannot be read.

    Example::

        with torch_ckpt.open("checkpoints/100") as checkpoint:
            for name in checkpoint.names:
                print(name, checkpoint.tensor(name))
    """
    require_path("open", checkpoint_id)
    return Checkpoint(checkpoint_id, options=options).open()


def preflight(
    state_dict: StateDict,
    checkpoint_id: CheckpointId,
    *,
    names: Names = None,
    rename: Rename = None,
    options: ReadOptions = DEFAULT_READ_OPTIONS,
    **removed: Never,
) -> LoadReport:
    """Compares a state dict with a checkpoint, in the same way as :func:`load`, but loads nothing.

    Reads only the metadata and the objects that list the parameter groups of optimizers, and
    compares only the state dict of this process. No other rank takes part.

    Args:
        state_dict, checkpoint_id, names, rename, options: see :func:`load`.
        removed: no keyword; the error for a former one names what replaces it.

    Returns:
        The names that fit, the names that are missing, and the shapes and dtypes that differ.

    Raises:
        FileNotFoundError, Unsafe, Corrupt: the metadata or a list of parameters cannot be read.
        ValueError: ``names`` or ``rename`` matches no name, or ``rename`` maps two names to the
            same name.

    Example::

        report = torch_ckpt.preflight({"model": model}, "checkpoints/100")
        if not report.fits:
            print(report)
    """
    with closing(source_of(preflight, checkpoint_id, options, removed)) as source:
        states = States(state_dict, calls=True)
        return LoadRun(source, Exchange(), states, names, rename, only_compared=True).compare()


def estimate_read_memory(
    state_dict: StateDict,
    checkpoint_id: CheckpointId,
    *,
    names: Names = None,
    rename: Rename = None,
    options: ReadOptions = DEFAULT_READ_OPTIONS,
    **removed: Never,
) -> ReadMemory:
    """Estimates the memory that :func:`load` needs on this rank. Reads only the metadata.

    Args:
        state_dict, checkpoint_id, names, rename, options: see :func:`load`.
        removed: no keyword; the error for a former one names what replaces it.

    Returns:
        The size of the tensors to load, and the additional memory that the load needs.

    Raises:
        FileNotFoundError, Unsafe, Corrupt: the metadata cannot be read.
        LoadMismatch: the checkpoint does not fit the state dict.

    Example::

        memory = torch_ckpt.estimate_read_memory({"model": model}, "checkpoints/100")
        print(memory.target_bytes, memory.beyond_targets_bytes)
    """
    with closing(source_of(estimate_read_memory, checkpoint_id, options, removed)) as source:
        states = States(state_dict, calls=True)
        return LoadRun(source, Exchange(), states, names, rename, only_compared=True).estimate()


def source_of(
    caller: Callable[..., object],
    checkpoint_id: CheckpointId,
    options: ReadOptions,
    removed: dict[str, Any],
) -> Source:
    """Returns the source of a load, which is not open yet.

    Args:
        caller: the function that the user called.
        checkpoint_id, options, removed: see :func:`load`.
    """
    if removed:
        refuse_options(caller, removed, options=ReadOptions)
    require_path(caller.__name__, checkpoint_id)
    return Source(checkpoint_id, options)


# --- shared by saves and loads -------------------------------------------------------------------


def target_of(
    caller: Callable[..., object],
    checkpoint_id: CheckpointId,
    format: Format,
    options: WriteOptions,
    removed: dict[str, Any],
) -> Target:
    """Returns the target of a save.

    Args:
        caller: the function that the user called.
        checkpoint_id, format, options, removed: see :func:`save`.
    """
    if removed:
        refuse_model_options(caller, removed)
    require_path(caller.__name__, checkpoint_id)
    if not isinstance(format, Safetensors):
        require_choice("format", format, ("checkpoint", "safetensors"))
        if format == "checkpoint":
            return checkpoint_target(checkpoint_id, options)
        format = Safetensors()
    return model_target(checkpoint_id, format, options)


def require_path(caller: str, checkpoint_id: object) -> None:
    """Raises TypeError or ValueError unless a checkpoint id is a path."""
    if not isinstance(checkpoint_id, (str, os.PathLike)):
        raise TypeError(
            f"checkpoint_id must be a path, got a {type(checkpoint_id).__name__}. Pass the state "
            f"dict first: {caller}(state_dict, path)."
        )
    if not os.fspath(checkpoint_id):
        raise ValueError("checkpoint_id is empty. Pass '.' for the current directory.")
