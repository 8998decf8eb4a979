"""Profiles part of a training run, and saves the traces with the run's other files."""

from __future__ import annotations

import errno
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from torch_ckpt.ranks.group import own_rank
from torch_ckpt.training.file_operations import StrPath, check, join, put

if TYPE_CHECKING:
    from torch.profiler import ProfilerActivity, profile


class _RunningProfile(NamedTuple):
    profiler: profile | None  # None on ranks that do not profile
    rank: int
    thread: int


_lock = threading.Lock()
_running: _RunningProfile | None = None


def start_profile(
    *,
    all_ranks: bool = False,
    activities: Iterable[ProfilerActivity] | None = None,
    record_shapes: bool = False,
    profile_memory: bool = False,
    with_stack: bool = False,
    with_flops: bool = False,
) -> None:
    """Starts ``torch.profiler`` on rank 0; on other ranks, only records that a profile was started.

    While a profile is running, memory use grows with each operation, and training is slower.
    Profile only a few steps.

    Args:
        all_ranks: profile every rank.
        activities: activities to record; None records all activities that the machine supports.
        record_shapes: record the shapes of the operations' arguments.
        profile_memory: record memory allocations and releases.
        with_stack: record the Python lines that call operations.
        with_flops: estimate the FLOPs of some operations.

    Raises:
        RuntimeError: a profile that this function or torch started is already running in this
            process.

    Example::

        training.start_profile()
        for batch in itertools.islice(batches, 3):
            train_step(batch)
        training.stop_profile("run/profiles")
    """
    global _running
    with _lock:
        if _running is not None:
            raise RuntimeError("start_profile: a profile is running; call stop_profile first")
        profiler = None
        if all_ranks or own_rank() == 0:
            # torch would cancel the running profiler and report this only in its log.
            if torch.autograd.profiler._is_profiler_enabled:
                raise RuntimeError("start_profile: a torch profiler is running; stop it first")
            from torch.profiler import profile

            profiler = profile(
                activities=activities,
                record_shapes=record_shapes,
                profile_memory=profile_memory,
                with_stack=with_stack,
                with_flops=with_flops,
            )
            profiler.start()
        _running = _RunningProfile(profiler, own_rank(), threading.get_ident())


def stop_profile(directory: StrPath) -> str | None:
    """Stops the profile and saves its trace in a directory.

    The trace is written to local temporary storage and then copied. Chrome, Perfetto and
    TensorBoard can display the trace.

    Args:
        directory: a local path or a URL, as for :func:`mkdir`; the directory is created if
            necessary.

    Returns:
        The path or URL of the trace file, which is named
        ``rank-{rank}.{nanoseconds}.pt.trace.json.gz``; None on ranks that did not profile.

    Raises:
        RuntimeError: no profile is running, or another thread started the running profile. The
            running profile continues.
        ImportError, ValueError: the URL is not supported; see :func:`mkdir`. The profile continues.
        OSError: the trace cannot be written or copied. If only the copy fails, the local trace is
            kept, and the message contains its path.

    Example::

        training.stop_profile("s3://bucket/run/profiles")
    """
    global _running
    with _lock:
        if _running is None:
            raise RuntimeError("stop_profile: no profile is running; call start_profile first")
        if _running.profiler is None:
            _running = None
            return None
        if _running.thread != threading.get_ident():
            raise RuntimeError(
                "stop_profile: another thread called start_profile; call stop_profile on that "
                "thread"
            )
        check(directory)
        stopped, _running = _running, None
        assert stopped.profiler is not None
        stopped.profiler.stop()
    local = Path(tempfile.mkdtemp(prefix="torch_ckpt-profile-"))
    name = f"rank-{stopped.rank}.{time.time_ns()}.pt.trace.json.gz"
    try:
        stopped.profiler.export_chrome_trace(str(local / name))
    except BaseException:
        shutil.rmtree(local, ignore_errors=True)
        raise
    target = join(directory, name)
    try:
        put(local / name, target)
    # Remote file systems raise exceptions of any type.
    except Exception as error:
        number = getattr(error, "errno", None) or errno.EIO
        raise OSError(
            number,
            f"the trace could not be copied ({error}) and is kept at {local / name}",
            target,
        ) from error
    shutil.rmtree(local, ignore_errors=True)
    return target
