"""Profiles part of a training run, and saves the traces with the run's other files."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch.profiler import profile

from torch_ckpt._base.system import local_path
from torch_ckpt.ranks.group import own_rank
from torch_ckpt.stores import open_store
from torch_ckpt.training.file_operations import StrPath, put

# The running profiler, None on ranks that do not profile; its rank; the thread that started it.
_running: tuple[profile | None, int, int] | None = None
_lock = threading.Lock()


def start_profile(profiler: profile | None = None, *, all_ranks: bool = False) -> None:
    """Starts a profile on rank 0; on other ranks, only records that a profile was started.

    While a profile is running, memory use grows with each operation, and training is slower.
    Profile only a few steps.

    Args:
        profiler: a ``torch.profiler.profile`` with other options than torch's defaults.
        all_ranks: profile every rank.

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
        if not all_ranks and own_rank() != 0:
            profiler = None
        else:
            # torch would cancel the running profiler and report this only in its log.
            if torch.autograd.profiler._is_profiler_enabled:
                raise RuntimeError("start_profile: a torch profiler is running; stop it first")
            profiler = profiler or profile()
            profiler.start()
        _running = profiler, own_rank(), threading.get_ident()


def stop_profile(directory: StrPath) -> str | None:
    """Stops the profile and saves its trace in a directory.

    The trace is written to local temporary storage and then copied. Chrome, Perfetto and
    TensorBoard can display the trace.

    Args:
        directory: a local path or a URL, which is created if necessary.

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
    if _running is None:
        raise RuntimeError("stop_profile: no profile is running; call start_profile first")
    profiler, rank, thread = _running
    if profiler is not None and thread != threading.get_ident():
        raise RuntimeError(
            "stop_profile: another thread called start_profile; call stop_profile on that thread"
        )
    directory = os.fspath(directory).rstrip("/")
    if local_path(directory) is None:
        open_store(directory)
    _running = None
    if profiler is None:
        return None
    profiler.stop()
    name = f"rank-{rank}.{time.time_ns()}.pt.trace.json.gz"
    local = Path(tempfile.mkdtemp(prefix="torch_ckpt-profile-"), name)
    target = f"{directory}/{name}"
    try:
        profiler.export_chrome_trace(str(local))
    except BaseException:
        shutil.rmtree(local.parent, ignore_errors=True)
        raise
    try:
        put(local, target)
    # Remote file systems raise exceptions of any type.
    except Exception as error:
        raise OSError(
            getattr(error, "errno", None) or errno.EIO,
            f"the trace could not be copied ({error}) and is kept at {local}",
            target,
        ) from error
    shutil.rmtree(local.parent, ignore_errors=True)
    return target
