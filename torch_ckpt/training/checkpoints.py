"""Steps saved and found again by two functions, for loops that need no more.

A :class:`torch_ckpt.CheckpointManager` over the same directory sees the same steps.
"""

from __future__ import annotations

import errno
import time
import uuid
import warnings
from typing import TYPE_CHECKING, Any

from torch_ckpt.training.files import StrPath, join

# The engine is imported by the functions, so that this package imports nothing.
if TYPE_CHECKING:
    import torch.distributed as dist

    from torch_ckpt.steps import StepStore

_TIMEOUT_SECONDS = 300.0


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
        state: as for :func:`torch_ckpt.save`.
        overwrite: whether a complete step may be replaced; it stays until the new one is complete.
        process_group: the ranks that save together; the default group if None.
        timeout: seconds after which a rank that gives no sign of life is given up.
        staging_dir: as for :class:`torch_ckpt.remote.RemoteSteps`.
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
    from torch_ckpt.multihost.calls import Call
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
    save(state, storage_writer=writer, process_group=process_group, timeout=timeout)


def load_checkpoint_if_it_exists(
    directory: StrPath,
    state: dict[str, Any],
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = _TIMEOUT_SECONDS,
    staging_dir: StrPath | None = None,
    max_io_threads: int | None = None,
    **load_options: Any,
) -> int:
    """Loads the newest complete step, that of rank 0's choice, in place. All ranks call it.

    Warns, on rank 0, of steps that are not complete, which are skipped.

    Args:
        directory: a local path or URL, which need not exist.
        state: as for :func:`torch_ckpt.load`.
        process_group: the ranks that load together; the default group if None.
        timeout: seconds after which a rank that has not come is given up.
        staging_dir: as for :class:`torch_ckpt.remote.RemoteSteps`.
        max_io_threads: the reader's ``thread_count``; None chooses for the machine.
        load_options: passed to :func:`torch_ckpt.load`.

    Returns:
        The step; 0 where there is no complete one, and then the state is as it was.

    Raises:
        CheckpointException: on every rank, as of :func:`torch_ckpt.load`.
        OSError: the directory cannot be listed; ``RuntimeError`` on the other ranks.
        ImportError, ValueError: of the URL, or of options that contradict each other.
    """
    from torch_ckpt.multihost.calls import Call
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

    with Call("load_checkpoint_if_it_exists", process_group, timeout) as call:
        newest, incomplete = call.exchange(look, lambda found: found[0])
        is_first = call.rank == 0
    if newest is not None:
        [steps] = opened
        steps.load(newest, state, process_group=process_group, **options)
    # Last, since it may be made an error, by which only rank 0 would leave the load.
    if incomplete and is_first:
        warnings.warn(
            f"skipped, since their saves or deletions have not ended: {', '.join(incomplete)}",
            stacklevel=2,
        )
    return newest or 0


def _with_threads(options: dict[str, Any], max_io_threads: int | None) -> dict[str, Any]:
    """The options with ``thread_count``, as the engine names it."""
    if max_io_threads is None:
        return options
    if "thread_count" in options:
        raise ValueError("max_io_threads and thread_count are the same: pass one of them")
    return {**options, "thread_count": max_io_threads}
