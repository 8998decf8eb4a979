"""Saves and loads steps with the parts of a checkpoint manager, for loops that do not need one."""

from __future__ import annotations

import dataclasses
import re
import time
from contextlib import ExitStack
from typing import Any, TypeVar

import torch.distributed as dist

from torch_ckpt._base.formatting import some_of
from torch_ckpt._base.log import warn
from torch_ckpt.loading.renaming import Rename
from torch_ckpt.loading.report import LoadReport, Names
from torch_ckpt.manager.manager import CheckpointManager
from torch_ckpt.manager.run_context import new_attempt
from torch_ckpt.options import DEFAULT_OPTIONS, DEFAULT_READ_OPTIONS, ReadOptions, WriteOptions
from torch_ckpt.ranks.collective_call import CollectiveCall
from torch_ckpt.ranks.group import TIMEOUT_SECONDS, RankGroup
from torch_ckpt.saving.handle import save
from torch_ckpt.state.states import BeforeSave
from torch_ckpt.steps import StepStore, open_steps
from torch_ckpt.training.file_operations import StrPath

_Options = TypeVar("_Options", WriteOptions, ReadOptions)

_LOAD = "load_checkpoint_if_it_exists"

# Names of per-rank values, such as "loader.rank3".
_PER_RANK_NAME = re.compile(r"(.*)\.rank\d+")


def save_checkpoint(
    directory: StrPath,
    step: int,
    state: dict[str, Any],
    *,
    overwrite: bool = False,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = TIMEOUT_SECONDS,
    max_io_threads: int | None = None,
    options: WriteOptions = DEFAULT_OPTIONS,
) -> None:
    """Saves a state as a step, and blocks until the step is complete.

    All ranks must call this function. Leftovers of interrupted saves in the directory are removed,
    unless another process is using them. The step belongs to the newest run that has saved to the
    directory, so that a :class:`torch_ckpt.CheckpointManager` continues from it.

    Args:
        directory: a local path or URL; the step is saved in the subdirectory ``{step:010d}``.
        step: the step number, from 0 to 9,999,999,999; must be the same on all ranks.
        state: names and values, as for :meth:`torch_ckpt.CheckpointManager.save`.
        overwrite: replace the step if it is already complete. The old step is kept until the new
            one is complete.
        process_group, timeout: see :func:`torch_ckpt.save`.
        max_io_threads: number of threads that write, the ``thread_count`` of the options.
        options: the options of the save.

    Raises:
        FileExistsError: the step is already complete and ``overwrite`` is False. Raised on all
            ranks.
        CheckpointException: the save failed; see :func:`torch_ckpt.save`.
        RanksDisagree: ranks passed different steps.
        OSError, ImportError, ValueError: the directory cannot be used. Raised on the rank that
            fails; the other ranks raise ``RuntimeError``.

    Example::

        training.save_checkpoint("run", step, {"model": model, "optimizer": optimizer})
    """
    options = _with_io_threads(options, max_io_threads)
    opened: list[StepStore] = []

    def begin() -> str:
        opened.append(open_steps(directory, storage_options=options.storage_options))
        if call.rank == 0:
            # Send heartbeats: removing many leftovers may exceed the other ranks' timeout.
            with call.alive(time.monotonic_ns):
                opened[0].sweep()
        return new_attempt()

    with CollectiveCall(f"save_checkpoint of step {step}", process_group, timeout) as call:
        attempt = call.agree(begin, lambda attempts: attempts[0])
    [steps] = opened
    save(
        lambda: BeforeSave().read(state),
        lambda: steps.target(
            step, options, attempt=attempt, may_replace=overwrite, marker=steps.run_marker
        ),
        RankGroup.of(process_group),
        timeout=timeout,
    )


def load_checkpoint_if_it_exists(
    directory: StrPath,
    state: dict[str, Any],
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = TIMEOUT_SECONDS,
    max_io_threads: int | None = None,
    strict: bool = True,
    names: Names = None,
    rename: Rename = None,
    free_before_read: bool = False,
    options: ReadOptions = DEFAULT_READ_OPTIONS,
) -> int:
    """Loads the newest complete step into the state, in place.

    All ranks must call this function; rank 0 chooses the step, as
    :meth:`torch_ckpt.CheckpointManager.restore` does. Rank 0 warns about incomplete and damaged
    steps, which are skipped (to save a skipped step again, pass ``overwrite=True`` to
    :func:`save_checkpoint`), about mixed steps of several runs, about names that the step has but
    no rank's state has, and about tensors that were converted to another dtype.

    Args:
        directory: a local path or URL, which need not exist.
        state: names and values, as for :func:`save_checkpoint`; plain values are replaced.
        max_io_threads: number of concurrent reads, the ``thread_count`` of the options.
        strict: require that the step has every name in the state, with the same shape and dtype. If
            False, load only the names whose shapes match, and convert dtypes.
        free_before_read: see :func:`torch_ckpt.load`. A damaged step is then an error.
        process_group, timeout, names, rename, options: see :func:`torch_ckpt.load`.

    Returns:
        The step number, or 0 if there is no complete step. In that case, the state is unchanged.

    Raises:
        CheckpointException: the load failed; see :func:`torch_ckpt.load`. The cause is
            ``LoadMismatch`` if ``strict`` is True and the step does not match the state.
        CheckpointError: all existing steps are damaged.
        OSError, ImportError, ValueError: see :func:`save_checkpoint`.

    Example::

        state = {"model": model, "optimizer": optimizer}
        step = training.load_checkpoint_if_it_exists("run", state)
    """
    options = _with_io_threads(options, max_io_threads)
    with ExitStack() as stack:

        def open_root() -> CheckpointManager:
            # Send heartbeats: requests to a URL may exceed the other ranks' timeout.
            with call.alive(time.monotonic_ns):
                # A manager that only reads holds no lease, and deletes nothing.
                return stack.enter_context(
                    CheckpointManager(
                        open_steps(directory, storage_options=options.storage_options),
                        read=options,
                        read_only=True,
                        preemption=None,
                        process_group=process_group,
                        timeout=timeout,
                    )
                )

        with CollectiveCall(_LOAD, process_group, timeout) as call:
            manager = call.run_on_all(open_root)
        step = manager._restore(
            state,
            None,
            names=names,
            strict="dtypes" if strict else False,
            rename=rename,
            free_before_read=free_before_read,
        )
    leftovers = manager._restorer.leftovers
    found = {"skipped steps whose saves or deletions are incomplete": leftovers}
    if step is not None:
        report = manager.restore_report
        assert report is not None  # there is no planner
        if names is None:
            with CollectiveCall(_LOAD, process_group, timeout) as call:
                # Each pipeline stage lacks the names of the other stages.
                unused: list[str] = call.agree(
                    lambda: _unused_names(report, state),
                    lambda names: sorted(set.intersection(*names)),
                )
            found[f"step {step} has names that are not in the state and were not loaded"] = unused
        # The load itself warns about tensors that lose precision.
        found["converted tensors to the dtypes of the state"] = [
            f"{name} (from {stored} to {loaded})"
            for name, stored, loaded in report.dtypes
            if name not in report.narrowed
        ]
    for text, parts in found.items():
        if call.rank == 0 and parts:
            warn(f"{text}: {some_of(parts)}")
    return step or 0


def _with_io_threads(options: _Options, max_io_threads: int | None) -> _Options:
    """Returns options with ``max_io_threads`` as the number of threads, unless it is None."""
    if max_io_threads is None:
        return options
    if options.thread_count is not None:
        raise ValueError("max_io_threads and thread_count are the same option; pass one of them")
    return dataclasses.replace(options, thread_count=max_io_threads)


def _unused_names(report: LoadReport, state: dict[str, Any]) -> set[str]:
    """Returns names that only the checkpoint has, excluding other ranks' per-rank values."""
    found = ((name, _PER_RANK_NAME.fullmatch(name)) for name in report.unexpected)
    return {name for name, match in found if match is None or match[1] not in state}
