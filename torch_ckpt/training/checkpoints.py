"""Steps saved and found again by two functions, for loops that need no more.

A :class:`torch_ckpt.CheckpointManager` over the same directory sees the same steps, and loads them
into the same state: all three take it through :class:`torch_ckpt.state.app_state.AppState`.
"""

from __future__ import annotations

import errno
import re
import time
import uuid
import warnings
from typing import TYPE_CHECKING, Any

from torch_ckpt.training.files import StrPath, join

# The engine is imported by the functions, so that this package imports nothing.
if TYPE_CHECKING:
    import torch.distributed as dist

    from torch_ckpt.loading.report import LoadReport
    from torch_ckpt.steps import StepStore

_TIMEOUT_SECONDS = 300.0

_LOAD = "load_checkpoint_if_it_exists"

# That a warning lists.
_MOST_NAMES = 10

# What a rank has for itself is under the value's key.
_OF_A_RANK = re.compile(r"(.*)\.rank\d+")


def save_checkpoint(
    directory: StrPath,
    step: int,
    state: dict[str, Any],
    *,
    overwrite: bool = False,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = _TIMEOUT_SECONDS,
    staging_dir: StrPath | None = None,
    max_io_threads: int | None = None,
    **writer_options: Any,
) -> None:
    """Saves a state as a step; returns when the step is complete. All ranks call it.

    What saves that died have left there is removed, where nobody works in it.

    Args:
        directory: a local path or URL; the step is in ``{step:010d}`` there.
        step: 0 to 9,999,999,999; the same on all ranks.
        state: names and values, as for :meth:`torch_ckpt.CheckpointManager.save`: modules and
            optimizers themselves, tensors, numbers, dicts of these.
        overwrite: whether a complete step may be replaced; it stays until the new one is complete.
        process_group: the ranks that save together; the default group if None.
        timeout: seconds after which a rank that gives no sign of life is given up.
        staging_dir: as for :class:`torch_ckpt.steps.remote.RemoteSteps`.
        max_io_threads: the writer's ``thread_count``; None chooses for the machine.
        writer_options: passed to :class:`torch_ckpt.FileSystemWriter`.

    Raises:
        FileExistsError: on every rank: the step is complete and may not be replaced.
        CheckpointException: on every rank, with the cause of each rank that failed: what
            :func:`torch_ckpt.save` raises, and ``FileExistsError`` where the step has become
            complete meanwhile.
        OSError: the directory cannot be listed; ``RuntimeError`` on the other ranks.
        RanksDisagree: ranks came with different steps.
        ImportError, ValueError: of the URL, or of options that contradict each other.
    """
    from torch_ckpt.api import save
    from torch_ckpt.ranks.calls import Call
    from torch_ckpt.state.app_state import AppState
    from torch_ckpt.steps import open_steps, step_name

    options = _with_threads(writer_options, max_io_threads)
    opened: list[StepStore] = []

    def begin() -> tuple[str, bool]:
        # Of a number that cannot be one all ranks tell, and not only the one that looks for it.
        step_name(step)
        opened.append(open_steps(directory, staging_dir=staging_dir))
        is_refused = False
        if call.rank == 0:
            # Of many leftovers the removal may take longer than the others wait.
            with call.alive(time.monotonic_ns):
                opened[0].sweep()
            is_refused = not overwrite and opened[0].is_complete(step)
        return uuid.uuid4().hex[:8], is_refused

    with Call(f"save_checkpoint of step {step}", process_group, timeout) as call:
        attempt, is_refused = call.exchange(begin, lambda brought: brought[0])
    if is_refused:
        raise FileExistsError(
            errno.EEXIST,
            "the step is there and complete; overwrite=True replaces it",
            join(directory, step_name(step)),
        )
    [steps] = opened
    writer = steps.writer(step, attempt=attempt, overwrite=overwrite, **options)
    read = AppState(state).state_dict
    save(read, storage_writer=writer, process_group=process_group, timeout=timeout)


def load_checkpoint_if_it_exists(
    directory: StrPath,
    state: dict[str, Any],
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = _TIMEOUT_SECONDS,
    staging_dir: StrPath | None = None,
    max_io_threads: int | None = None,
    strict: bool = True,
    **load_options: Any,
) -> int:
    """Loads the newest complete step, that of rank 0's choice, in place. All ranks call it.

    Warns, on rank 0, of steps that are not complete, which are skipped, of names in the step that
    the state of no rank has, and of tensors that were converted to another dtype.

    Args:
        directory: a local path or URL, which need not exist.
        state: as for :func:`save_checkpoint`; plain values in it are replaced.
        process_group: the ranks that load together; the default group if None.
        timeout: seconds after which a rank that has not come is given up.
        staging_dir: as for :class:`torch_ckpt.steps.remote.RemoteSteps`.
        max_io_threads: the reader's ``thread_count``: reads under way at once; None: 8.
        strict: raise ``LoadMismatch`` where something in the state is missing in the step, or has
            another shape or dtype there. False: load what fits, and convert dtypes.
        load_options: passed to :func:`torch_ckpt.load`.

    Returns:
        The step; 0 where there is no complete one, and then the state is as it was.

    Raises:
        CheckpointException: on every rank, as of :func:`torch_ckpt.load`.
        CheckpointError: a value cannot take its state, as an optimizer that has other states than
            the checkpoint; names the key. ``RuntimeError`` on the other ranks.
        OSError: the directory cannot be listed; ``RuntimeError`` on the other ranks.
        ImportError, ValueError: of the URL, or of options that contradict each other.
    """
    from torch_ckpt._base.formatting import some_of
    from torch_ckpt.ranks.calls import Call
    from torch_ckpt.state.app_state import AppState
    from torch_ckpt.steps import open_steps

    options = _with_threads(load_options, max_io_threads)
    opened: list[StepStore] = []

    def look() -> tuple[int | None, list[str]]:
        opened.append(open_steps(directory, staging_dir=staging_dir))
        if call.rank != 0:
            return None, []
        entries = opened[0].entries()
        newest = max((entry.step for entry in entries if entry.complete), default=None)
        return newest, [entry.path for entry in entries if not entry.complete]

    warned: list[str] = []
    with Call(_LOAD, process_group, timeout) as call:
        newest, incomplete = call.exchange(look, lambda found: found[0])
        is_first = call.rank == 0
    if incomplete:
        warned.append(
            f"skipped, since their saves or deletions have not ended: {', '.join(incomplete)}"
        )
    if newest is not None:
        [steps] = opened
        reports: list[LoadReport | None] = []

        def load(target: dict[str, Any]) -> None:
            options["strict"] = "dtypes" if strict else False
            told = {"process_group": process_group, "timeout": timeout, **options}
            reports.append(steps.load(newest, target, **told))

        AppState(state).restore(load, call=_LOAD, process_group=process_group, timeout=timeout)
        if load_options.get("names") is None:
            # Stages of a pipeline have names that others lack.
            with Call(_LOAD, process_group, timeout) as call:
                unused = call.exchange(lambda: _unused(reports[0], state), _common)
            if unused:
                warned.append(
                    f"step {newest} has what the state has no place for, and it was not loaded: "
                    f"{some_of(unused, _MOST_NAMES)}"
                )
        converted = _converted_unnamed(reports[0])
        if converted:
            warned.append(
                f"loaded into dtypes other than the stored ones: {some_of(converted, _MOST_NAMES)}"
            )
    if is_first:
        # Last, since they may be made errors, by which only rank 0 would leave the load.
        for text in warned:
            warnings.warn(text, stacklevel=2)
    return newest or 0


def _unused(report: LoadReport | None, state: dict[str, Any]) -> set[str]:
    """The names that only the checkpoint has, but for those of other ranks' own values."""
    names = report.unexpected if report is not None else ()
    return {
        name
        for name in names
        if not ((own := _OF_A_RANK.fullmatch(name)) and own.group(1) in state)
    }


def _converted_unnamed(report: LoadReport | None) -> list[str]:
    """The tensors that were converted, without those that the reader's own warning names."""
    if report is None:
        return []
    narrowed = set(report.narrowed)
    return [
        f"{name} (stored {stored}, here {here})"
        for name, stored, here in report.dtypes
        if name not in narrowed
    ]


def _common(names: list[set[str]]) -> list[str]:
    return sorted(set.intersection(*names))


def _with_threads(options: dict[str, Any], max_io_threads: int | None) -> dict[str, Any]:
    """The options with ``thread_count``, as the engine names it."""
    if max_io_threads is None:
        return options
    if "thread_count" in options:
        raise ValueError("max_io_threads and thread_count are the same: pass one of them")
    return {**options, "thread_count": max_io_threads}
