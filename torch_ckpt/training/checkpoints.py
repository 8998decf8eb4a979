"""Two functions that save and load steps, for loops that do not need a manager.

A :class:`torch_ckpt.CheckpointManager` with the same root sees the same steps and loads them into
the same state, because all of them save and load by the same functions.
"""

from __future__ import annotations

import dataclasses
import errno
import re
import time
import uuid
import warnings
from typing import TYPE_CHECKING, Any, TypeVar

from torch_ckpt.training.file_operations import StrPath, join

# The functions import the engine when called, so that importing this package does not.
if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.checkpoint.planner import LoadPlanner
    from typing_extensions import Never  # in typing since Python 3.11

    from torch_ckpt.loading.renaming import Rename
    from torch_ckpt.loading.report import LoadReport, Names
    from torch_ckpt.options import ReadOptions, WriteOptions
    from torch_ckpt.steps import StepStore

    _Options = TypeVar("_Options", WriteOptions, ReadOptions)

_TIMEOUT_SECONDS = 300.0

_LOAD = "load_checkpoint_if_it_exists"

# Maximum number of names in a warning.
_MAX_NAMES = 10

# Names of per-rank values, such as "loader.rank3".
_PER_RANK_NAME = re.compile(r"(.*)\.rank\d+")


def save_checkpoint(
    directory: StrPath,
    step: int,
    state: dict[str, Any],
    *,
    overwrite: bool = False,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = _TIMEOUT_SECONDS,
    max_io_threads: int | None = None,
    options: WriteOptions | None = None,
    **removed: Never,
) -> None:
    """Saves a state as a step, and blocks until the step is complete.

    All ranks must call this function. Leftovers of interrupted saves in the directory are removed,
    unless another process is using them. The step belongs to the newest run that has saved to the
    directory, so that a manager continues from it.

    Args:
        directory: a local path or URL; the step is saved in the subdirectory ``{step:010d}``.
        step: the step number, from 0 to 9,999,999,999; must be the same on all ranks.
        state: names and values, as for :meth:`torch_ckpt.CheckpointManager.save`: modules,
            optimizers, tensors, numbers, and dicts of these.
        overwrite: replace the step if it is already complete. The old step is kept until the new
            one is complete.
        process_group: the ranks that save together; None means the default group.
        timeout: seconds after which a rank that sends no heartbeat is declared dead.
        max_io_threads: number of threads that write, the ``thread_count`` of the options. None
            chooses a number that suits the machine.
        options: the options of the save; None chooses the defaults.
        removed: no keyword; the error for a former one names what replaces it.

    Raises:
        FileExistsError: the step is already complete and ``overwrite`` is False; raised on every
            rank.
        CheckpointException: the save failed; raised on every rank with the cause from each failed
            rank; see :func:`torch_ckpt.save`. The cause is ``FileExistsError`` if another process
            completed the step during the save.
        OSError: the directory cannot be listed. Other ranks raise ``RuntimeError``.
        RanksDisagree: ranks passed different steps.
        ImportError: the URL needs a package that is not installed.
        ValueError: the URL's protocol is not supported, or options contradict each other.

    Example::

        training.save_checkpoint("run", step, {"model": model, "optimizer": optimizer})
    """
    from torch_ckpt.options import WriteOptions, refuse_options
    from torch_ckpt.ranks.collective_call import CollectiveCall
    from torch_ckpt.ranks.group import RankGroup
    from torch_ckpt.saving.handle import save
    from torch_ckpt.state.states import BeforeSave
    from torch_ckpt.steps import open_steps, step_name

    if removed:
        refuse_options(save_checkpoint, removed, options=WriteOptions)
    options = _with_io_threads(WriteOptions() if options is None else options, max_io_threads)
    opened: list[StepStore] = []

    def begin() -> tuple[str, bool]:
        # Check the step here, so that all ranks raise ValueError, not only rank 0.
        step_name(step)
        opened.append(open_steps(directory, storage_options=options.storage_options))
        is_refused = False
        if call.rank == 0:
            # Send heartbeats: removing many leftovers may exceed the other ranks' timeout.
            with call.alive(time.monotonic_ns):
                opened[0].sweep()
            is_refused = not overwrite and opened[0].is_complete(step)
        return uuid.uuid4().hex[:8], is_refused

    with CollectiveCall(f"save_checkpoint of step {step}", process_group, timeout) as call:
        attempt, is_refused = call.agree(begin, lambda results: results[0])
    if is_refused:
        raise FileExistsError(
            errno.EEXIST,
            "the step already exists and is complete. Pass overwrite=True to replace it",
            join(directory, step_name(step)),
        )
    [steps] = opened
    target = steps.target(
        step, options, attempt=attempt, may_replace=overwrite, marker=steps.run_marker
    )
    group = RankGroup.of(process_group)
    save(lambda: BeforeSave().read(state), lambda: target, group, timeout=timeout)


def load_checkpoint_if_it_exists(
    directory: StrPath,
    state: dict[str, Any],
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = _TIMEOUT_SECONDS,
    max_io_threads: int | None = None,
    strict: bool = True,
    names: Names = None,
    rename: Rename = None,
    free_before_read: bool = False,
    planner: LoadPlanner | None = None,
    options: ReadOptions | None = None,
    **removed: Never,
) -> int:
    """Loads the newest complete step into the state, in place.

    All ranks must call this function; rank 0 chooses the step, as
    :meth:`torch_ckpt.CheckpointManager.restore` does. Incomplete steps are skipped. Rank 0 warns
    about incomplete steps, about mixed steps of several runs, about names that the loaded step has
    but no rank's state has, and about tensors that were converted to another dtype.

    Args:
        directory: a local path or URL, which need not exist.
        state: names and values, as for :func:`save_checkpoint`; plain values are replaced.
        process_group: the ranks that load together; None means the default group.
        timeout: seconds after which a rank that sends no heartbeat is declared dead.
        max_io_threads: number of concurrent reads, passed to the reader as ``thread_count``. None
            means 8.
        strict: require that the step has every name in the state, with the same shape and dtype. If
            False, load only the names whose shapes match, and convert dtypes.
        names, rename, free_before_read, planner, options: see :func:`torch_ckpt.load`.
        removed: no keyword; the error for a former one names what replaces it.

    Returns:
        The step number, or 0 if there is no complete step. In that case, the state is unchanged.

    Raises:
        CheckpointException: the load failed; raised on every rank; see :func:`torch_ckpt.load`. The
            cause is ``LoadMismatch`` if ``strict`` is True and the step does not match the state.
            Another cause is a value that rejects its loaded state, for example because an optimizer
            has a different structure; its message begins with the value's key.
        OSError: the directory cannot be listed. Other ranks raise ``RuntimeError``.
        ImportError: the URL needs a package that is not installed.
        ValueError: the URL's protocol is not supported, or options contradict each other.

    Example::

        state = {"model": model, "optimizer": optimizer}
        step = training.load_checkpoint_if_it_exists("run", state)
    """
    from torch_ckpt._base.formatting import some_of
    from torch_ckpt.checkpoint.lineage import by_lineage, describe_mixture
    from torch_ckpt.loading.report import LoadReport
    from torch_ckpt.options import ReadOptions, refuse_options
    from torch_ckpt.ranks.collective_call import CollectiveCall
    from torch_ckpt.steps import open_steps

    if removed:
        refuse_options(load_checkpoint_if_it_exists, removed, options=ReadOptions)
    options = _with_io_threads(ReadOptions() if options is None else options, max_io_threads)
    opened: list[StepStore] = []

    def list_steps() -> tuple[int | None, str, list[str]]:
        opened.append(open_steps(directory, storage_options=options.storage_options))
        if call.rank != 0:
            return None, "", []
        entries = opened[0].entries()
        current, abandoned = by_lineage(entry for entry in entries if entry.complete)
        newest = current[0].step if current else None
        incomplete = [entry.path for entry in entries if not entry.complete]
        return newest, describe_mixture(current, abandoned), incomplete

    warned: list[str] = []
    with CollectiveCall(_LOAD, process_group, timeout) as call:
        newest, mixture, incomplete = call.agree(list_steps, lambda results: results[0])
        is_first = call.rank == 0
    if incomplete:
        warned.append(
            f"skipped steps whose saves or deletions are incomplete: {', '.join(incomplete)}"
        )
    if mixture:
        warned.append(f"{directory}: {mixture}")
    if newest is not None:
        [steps] = opened
        loaded = steps.load(
            newest,
            state,
            options=options,
            planner=planner,
            process_group=process_group,
            strict="dtypes" if strict else False,
            names=names,
            rename=rename,
            free_before_read=free_before_read,
            timeout=timeout,
            restores_structure=True,
        )
        # With a planner, there is no comparison.
        report = loaded if isinstance(loaded, LoadReport) else LoadReport()
        if names is None:
            # Only names that no rank has: each pipeline stage lacks the names of the other stages.
            with CollectiveCall(_LOAD, process_group, timeout) as call:
                unused: list[str] = call.agree(
                    lambda: _unused_names(report, state),
                    lambda names: sorted(set.intersection(*names)),
                )
            if unused:
                warned.append(
                    f"step {newest} has names that are not in the state and were not loaded: "
                    f"{some_of(unused, _MAX_NAMES)}"
                )
        converted = _converted_tensors(report)
        if converted:
            warned.append(
                f"converted tensors to the dtypes of the state: {some_of(converted, _MAX_NAMES)}"
            )
    if is_first:
        # Warn last: if warnings are errors, a warning would make rank 0 leave the load early.
        for text in warned:
            warnings.warn(text, stacklevel=2)
    return newest or 0


def _with_io_threads(options: _Options, max_io_threads: int | None) -> _Options:
    """Returns options with ``max_io_threads`` as the number of threads, unless it is None."""
    if max_io_threads is None:
        return options
    if options.thread_count is not None:
        raise ValueError("max_io_threads and thread_count are the same option; pass one of them")
    return dataclasses.replace(options, thread_count=max_io_threads)


def _unused_names(report: LoadReport, state: dict[str, Any]) -> set[str]:
    """Returns names that only the checkpoint has, excluding other ranks' per-rank values."""
    return {
        name
        for name in report.unexpected
        if not ((per_rank := _PER_RANK_NAME.fullmatch(name)) and per_rank.group(1) in state)
    }


def _converted_tensors(report: LoadReport) -> list[str]:
    """Returns the converted tensors, except those that the reader has already warned about."""
    narrowed = set(report.narrowed)
    return [
        f"{name} (from {stored} to {loaded})"
        for name, stored, loaded in report.dtypes
        if name not in narrowed
    ]
