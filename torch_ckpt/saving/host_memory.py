"""Host memory for saves: the budget of a snapshot, and the reserve that is allocated in advance."""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torch_ckpt import _C, _core
from torch_ckpt._base.life_cycle import Part, register
from torch_ckpt._base.log import LOGGER
from torch_ckpt._core import trim_pool as trim_pool
from torch_ckpt.options import CHUNK_BYTES, DEVICE_CHUNK_BYTES, Background

#: Maximum share of the free memory that a snapshot uses. Other code may need the remaining memory.
_SHARE_OF_FREE_MEMORY = 0.5
_LEAST_SNAPSHOT_BYTES = 64 << 20
#: Control groups version 2, then version 1: the directory in a container, its files with the memory
#: limit and usage, and the prefix of totals in the statistics.
_CONTROL_GROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", ""),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
#: Bytes to allocate between two checks of the free memory: a fraction of a second of work.
_STEP_BYTES = 64 * CHUNK_BYTES
#: Chunks for each file that the engine needs to use large chunks (csrc/engine/save_session.cpp).
_CHUNKS_PER_FILE = 3


def _share_of_free_memory(ranks: int, free: Callable[[], int]) -> int:
    here = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
    # Count the memory that this process already has. A running save may be using some of it.
    own = max(_core.pool_bytes(), _core.reserved_bytes())
    return int((free() + own) * _SHARE_OF_FREE_MEMORY) // here


def free_memory(groups: Iterable[tuple[str, str, str, str]] = _CONTROL_GROUPS) -> int:
    """Returns the number of bytes that this process can still allocate, given the limits of the
    machine and the control group."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    for directory, limit, used, total in groups:
        # The files do not exist if another version of control groups is in use, and the limit may
        # be "max".
        with contextlib.suppress(OSError, ValueError):
            free = min(free, _free_in_group(Path(directory), limit, used, total))
    return max(free, 0)


def _free_in_group(directory: Path, limit: str, used: str, total: str) -> int:
    most, taken = (int((directory / name).read_text()) for name in (limit, used))
    statistics = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    # Count the page cache as free: it counts as used, but is evicted when memory is needed.
    # Otherwise a job would seem to have no memory left after it has written enough files.
    cached = sum(int(statistics.get(f"{total}{kind}_file", 0)) for kind in ("active", "inactive"))
    return most - taken + cached


def default_snapshot_bytes(ranks: int, free: Callable[[], int] = free_memory) -> int:
    """Returns the default limit on the host memory of a snapshot on this rank, in bytes.

    The limit is this rank's share of half of the free memory, or the size of the reserve if that is
    larger.

    Args:
        ranks: number of ranks that save together. They are assumed to share one machine, unless
            ``LOCAL_WORLD_SIZE`` is set, as by torchrun.
        free: returns the number of bytes that this process can still allocate.
    """
    reserve = min(_core.reserve_bytes(), _core.reserved_bytes())
    return max(_LEAST_SNAPSHOT_BYTES, _share_of_free_memory(ranks, free), reserve)


def reserve_pool(
    bytes: int, *, device: torch.device | str | int | None = None, wait: bool = True
) -> int:
    """Allocates host memory for snapshots in advance, so that the first save need not allocate any.

    Call this function when the program starts. Pass the size of this rank's part of the state, plus
    4 MiB for each file that the rank writes. The memory is kept until :func:`trim_pool` is called.
    Saves and loads do not free this memory, even if their own memory budget is smaller. A later
    call of this function never shrinks the reserve.

    The reserve never exceeds the default memory budget of a save. That budget is half of the free
    memory (of the machine or the control group, whichever has less), divided by the number of ranks
    on the machine. If this limit ends the allocation early, a warning is logged.

    Args:
        bytes: size of the reserve, rounded up to a multiple of the chunk size. The chunk size is 4
            MiB, or 16 MiB if ``device`` is given.
        device: a CUDA device whose tensors will be copied to the reserve. If a device is given, the
            memory is page-locked in pieces of 64 MiB. A reserve for a device replaces a reserve for
            the host, and vice versa.
        wait: False returns immediately, and a low-priority thread allocates the memory. Errors in
            the thread are logged. To wait until the thread has finished, call this function again
            with the same size.

    Returns:
        The number of bytes reserved so far, including memory that a running save is using.

    Raises:
        OSError: the system is out of memory. Memory that was allocated before the failure stays
            reserved.
        TypeError: ``bytes`` is not an integer.
        ValueError: ``bytes`` is negative, ``device`` is not a CUDA device, or torch was built
            without CUDA.

    Examples:
        ```python
        torch_ckpt.reserve_pool(8 << 30, wait=False)  # 8 GiB, while the data loaders start
        ```
    """
    return reserve.make(bytes, device, wait)


def _ordinal(device: torch.device | str | int | None) -> int:
    """Returns the engine's number for a CUDA device, and -1 for None."""
    if device is None:
        return -1
    # torch interprets a number as a device of its current accelerator type.
    given = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if given.type != "cuda" or not _C.has_cuda:
        raise ValueError(
            f"device must be a CUDA device, and torch must be built for CUDA, but got {given}"
        )
    return given.index if given.index is not None else torch.cuda.current_device()


def _device_of(tensor: torch.Tensor) -> torch.device | None:
    """Returns the CUDA device of a tensor, or None."""
    return tensor.device if tensor.is_cuda else None


def _needed(
    tensors: Iterable[Any], ranks: int, files: int, budget: int
) -> tuple[int, torch.device] | None:
    """Returns the bytes to reserve and their device, or None if a save would not use them."""
    on_devices: dict[torch.device, int] = {}
    total = 0
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            local, replicas = tensor._local_tensor, _replicas_of(tensor)
        elif isinstance(tensor, torch.Tensor):
            local, replicas = tensor, ranks
        else:
            continue
        held = local.numel() * local.itemsize // replicas
        total += held
        device = _device_of(local)
        if device is not None:
            on_devices[device] = on_devices.get(device, 0) + held
    if not on_devices or sum(on_devices.values()) <= total // 2:
        return None
    # The engine uses smaller chunks for small files and for small budgets.
    if total < files * DEVICE_CHUNK_BYTES:
        return None
    if budget < _CHUNKS_PER_FILE * files * DEVICE_CHUNK_BYTES:
        return None
    needed = min(total + files * DEVICE_CHUNK_BYTES, budget)
    device = max(on_devices, key=lambda one: on_devices[one])
    return needed // DEVICE_CHUNK_BYTES * DEVICE_CHUNK_BYTES, device


def _replicas_of(tensor: DTensor) -> int:
    """Returns the number of ranks that have the same part of a tensor."""
    mesh = tensor.device_mesh
    return math.prod(
        mesh.size(dimension)
        for dimension, placement in enumerate(tensor.placements)
        if placement.is_replicate()
    )


def _chunk_bytes(ordinal: int) -> int:
    """Returns the chunk size for saves from a device, where -1 means the host."""
    return CHUNK_BYTES if ordinal < 0 else DEVICE_CHUNK_BYTES


def _set_target(bytes: int, ordinal: int) -> int:
    """Sets the target of the reserve, and returns it."""
    chunk = _chunk_bytes(ordinal)
    # Round up to whole chunks. Otherwise the last chunk would exceed the reserve.
    total = -(-bytes // chunk) * chunk
    _core.set_reserve(total, chunk)
    return total


def _has_failed(future: Future[None]) -> bool:
    return future.cancelled() or future.exception() is not None


class Reserve:
    """Memory that is allocated before saves need it, in threads or at once.

    Args:
        free: returns the number of bytes that this process can still allocate.
        step_bytes: bytes to allocate between two checks of the free memory.

    Attributes:
        has_saved: True after the first snapshot of this process; set by the save.
        is_closed: True after :meth:`close`.
    """

    def __init__(
        self, free: Callable[[], int] = free_memory, step_bytes: int = _STEP_BYTES
    ) -> None:
        self.has_saved = self.is_closed = False
        self._free = free
        self._step_bytes = step_bytes
        self._threads: list[threading.Thread] = []
        #: True if the program has requested the reserve.
        self._is_requested = False
        #: Held while the target is set, so that a state's reserve never replaces a requested one.
        self._target_lock = threading.Lock()

    def make(self, bytes: int, device: torch.device | str | int | None, wait: bool) -> int:
        """Implements :func:`reserve_pool`."""
        if operator.index(bytes) < 0:
            raise ValueError(f"bytes must not be negative, got {bytes}")
        ordinal = _ordinal(device)
        with self._target_lock:
            total = _set_target(bytes, ordinal)
            self._is_requested = True
        if wait:
            return self._grow(total, ordinal, None, logging.WARNING)
        self._start(total, ordinal, logging.WARNING)
        return _core.reserved_bytes()

    def make_or_log(self, bytes: int, device: torch.device | str | int | None) -> None:
        """Calls :meth:`make` without waiting. Logs errors instead of raising them."""
        try:
            self.make(bytes, device, wait=False)
        except Exception as error:
            _log_failure(bytes, error)

    def make_for_state(
        self,
        tensors: Iterable[Any],
        *,
        ranks: int,
        files: int,
        max_host_bytes: int | None,
        after: Future[None] | None = None,
    ) -> None:
        """Reserves page-locked memory in the background for a snapshot of tensors on a CUDA device,
        so that later saves need not allocate it. Never raises an exception.

        Does nothing if most bytes are on the host, if the program has requested a reserve, or after
        the first snapshot of this process, which has allocated its memory. The reserve never
        exceeds the budget of a save.

        Args:
            tensors: all tensors of the state on this rank; other values are ignored.
            ranks: number of ranks that save together. Each saves its part of the replicated
                tensors.
            files: number of files that this rank writes concurrently.
            max_host_bytes: budget of a save; None means the default budget.
            after: the reservation begins when this future is done; None begins it immediately.
        """
        if not _C.has_cuda or self._is_requested or self.has_saved:
            return
        try:
            budget = default_snapshot_bytes(ranks, self._free)
            if max_host_bytes is not None:
                budget = min(budget, max_host_bytes)
            needed = _needed(tensors, ranks, files, budget)
            if needed is None:
                return
            if after is None:
                self._start_for_state(*needed)
            else:
                after.add_done_callback(
                    lambda done: None if _has_failed(done) else self._start_for_state(*needed)
                )
        except Exception as error:
            LOGGER.warning("could not reserve memory for saves in advance: %s", error)

    def _start_for_state(self, bytes: int, device: torch.device) -> None:
        try:
            ordinal = _ordinal(device)
            with self._target_lock:
                # Either may have changed since make_for_state() was called.
                if self._is_requested or self.is_closed:
                    return
                total = _set_target(bytes, ordinal)
            # Other code may use the free memory meanwhile. That is no reason to warn, because the
            # program has not requested a reserve.
            self._start(total, ordinal, logging.INFO)
        except Exception as error:
            _log_failure(bytes, error)

    def limit(self, max_host_bytes: int) -> None:
        """Trims the memory of :meth:`make_for_state` to the budget of a save. Does not change a
        reserve that the program has requested."""
        if not self._is_requested and _core.reserve_bytes() > max_host_bytes:
            trim_pool(max_host_bytes)

    def join(self) -> None:
        """Waits for the threads that allocate."""
        for thread in self._threads:
            thread.join()

    def close(self) -> None:
        """Ends the running allocations and prevents later ones. Called at interpreter exit."""
        self.is_closed = True
        self.join()

    def forget_in_child(self) -> None:
        """Forgets the threads, which a forked child does not have."""
        self.is_closed = self.has_saved = self._is_requested = False
        self._threads = []
        self._target_lock = threading.Lock()

    def _start(self, total: int, ordinal: int, log_level: int) -> None:
        if self.is_closed:
            return
        thread = threading.Thread(
            target=self._grow_or_log,
            args=(total, ordinal, log_level),
            name="torch_ckpt reserve",
            daemon=True,
        )
        thread.start()
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]

    def _grow(self, total: int, device: int, background: Background | None, log_level: int) -> int:
        there = _core.reserved_bytes()
        # Stop if the requested reserve is now smaller: it was trimmed, or memory ran out.
        while there < total <= _core.reserve_bytes() and not self.is_closed:
            ranks = dist.get_world_size() if dist.is_initialized() else 1
            most = _share_of_free_memory(ranks, self._free)
            if most < there + _chunk_bytes(device):
                _core.end_reserve()
                LOGGER.log(
                    log_level,
                    "reserved only %d of %d bytes for saves: this rank may use at most %d bytes, "
                    "its share of half of the free memory of the machine and the control group",
                    there,
                    total,
                    most,
                )
                break
            step = min(total, most, there + self._step_bytes)
            there = _core.grow_reserve(step, device, background)
        return there

    def _grow_or_log(self, total: int, device: int, log_level: int) -> None:
        try:
            self._grow(total, device, Background(), log_level)
        except Exception as error:
            _log_failure(total, error)


def _log_failure(bytes: int, error: Exception) -> None:
    LOGGER.warning("could not reserve %d bytes for saves: %s", bytes, error)


#: The reserve of this process.
reserve = Reserve()
register(Part.MEMORY, in_child=reserve.forget_in_child)
