"""Profiles of a stretch of training: taken locally, kept where all files of a run are."""

from __future__ import annotations

import errno
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torch_ckpt.ranks.meeting import own_rank
from torch_ckpt.training.files import StrPath, check, join, put

if TYPE_CHECKING:
    from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class _Taken:
    profiler: profile | None  # None on a rank that only keeps step
    rank: int
    thread: int


_lock = threading.Lock()
_taken: _Taken | None = None


def start_profile(
    *,
    all_ranks: bool = False,
    activities: Iterable[ProfilerActivity] | None = None,
    record_shapes: bool = False,
    profile_memory: bool = False,
    with_stack: bool = False,
    with_flops: bool = False,
) -> None:
    """Begins a profile by ``torch.profiler``, on rank 0; elsewhere only remembers the call.

    It grows in memory with each operation, and slows training down: a few steps are enough.

    Args:
        all_ranks: every rank takes one.
        activities: what to record; None for all that this machine has.
        record_shapes: of the operations' arguments.
        profile_memory: allocations and releases.
        with_stack: the lines of Python that operations come from.
        with_flops: of some operations, by formula.

    Raises:
        RuntimeError: this process takes a profile already, by this function or by torch's.
    """
    global _taken
    with _lock:
        if _taken is not None:
            raise RuntimeError("start_profile: a profile is being taken; call stop_profile first")
        profiler = None
        if all_ranks or own_rank() == 0:
            # torch would cancel that one, and say so only in its log.
            if torch.autograd.profiler._is_profiler_enabled:
                raise RuntimeError(
                    "start_profile: a profiler of torch's is running; stop that one first"
                )
            from torch.profiler import profile

            profiler = profile(
                activities=activities,
                record_shapes=record_shapes,
                profile_memory=profile_memory,
                with_stack=with_stack,
                with_flops=with_flops,
            )
            profiler.start()
        _taken = _Taken(profiler, own_rank(), threading.get_ident())


def stop_profile(directory: StrPath) -> str | None:
    """Ends the profile and puts its trace into a directory, which is made where it is not there.

    The trace is written to local temporary storage first. Chrome, Perfetto and TensorBoard read it.

    Args:
        directory: a local path or a URL, as of :func:`mkdir`.

    Returns:
        The path or URL of the trace, ``rank-{rank}.{nanoseconds}.pt.trace.json.gz``; None on ranks
        that took none.

    Raises:
        RuntimeError: no profile is being taken, or another thread has begun it; that one goes on.
        ImportError, ValueError: of a URL, as of :func:`mkdir`; the profile goes on.
        OSError: the trace could not be written, or not be copied; then it says where the local one
            is, which stays.
    """
    global _taken
    with _lock:
        if _taken is None:
            raise RuntimeError("stop_profile: no profile is being taken; call start_profile first")
        if _taken.profiler is None:
            _taken = None
            return None
        if _taken.thread != threading.get_ident():
            raise RuntimeError("stop_profile: call it on the thread that has called start_profile")
        check(directory)
        taken, _taken = _taken, None
        assert taken.profiler is not None
        taken.profiler.stop()
    local = Path(tempfile.mkdtemp(prefix="torch_ckpt-profile-"))
    name = f"rank-{taken.rank}.{time.time_ns()}.pt.trace.json.gz"
    try:
        taken.profiler.export_chrome_trace(str(local / name))
    except BaseException:
        shutil.rmtree(local, ignore_errors=True)
        raise
    target = join(directory, name)
    try:
        put(local / name, target)
    # Whatever a remote file system raises.
    except Exception as error:
        number = getattr(error, "errno", None) or errno.EIO
        raise OSError(
            number, f"the trace was not copied ({error}) and stays at {local / name}", target
        ) from error
    shutil.rmtree(local, ignore_errors=True)
    return target
