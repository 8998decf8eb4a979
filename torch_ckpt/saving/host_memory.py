"""Host memory of saves: how much of it a snapshot may take, and making it ahead of need."""

from __future__ import annotations

import contextlib
import operator
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist

from torch_ckpt import _C, _core
from torch_ckpt._base.life_cycle import Part, register
from torch_ckpt._base.log import LOGGER
from torch_ckpt.saving.background import CHUNK_BYTES, DEVICE_CHUNK_BYTES, Background

#: For memory that other things need beside a snapshot.
_SHARE_OF_FREE_MEMORY = 0.5
_LEAST_SNAPSHOT_BYTES = 64 << 20
#: Where a container sees its control group's limit and use, and the prefix of the totals among its
#: statistics: version 2 and version 1.
_CONTROL_GROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", ""),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
#: How much is made before it is looked again how much is free. A fraction of a second's work.
_STEP_BYTES = 64 * CHUNK_BYTES


def _share_of_free_memory(ranks: int, free: Callable[[], int]) -> int:
    here = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
    # A save under way has taken some of the reserve.
    own = max(_core.pool_bytes(), _core.reserved_bytes())
    return int((free() + own) * _SHARE_OF_FREE_MEMORY) // here


def free_memory(groups: Iterable[tuple[str, str, str, str]] = _CONTROL_GROUPS) -> int:
    """Bytes that this process may still take, of the machine and of its control group."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    for directory, limit, used, total in groups:
        # Absent without this version of control groups; "max" is not a number.
        with contextlib.suppress(OSError, ValueError):
            free = min(free, _free_in_group(Path(directory), limit, used, total))
    return max(free, 0)


def _free_in_group(directory: Path, limit: str, used: str, total: str) -> int:
    most, taken = (int((directory / name).read_text()) for name in (limit, used))
    statistics = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    # Cached files count as used, and go when something else needs the memory: a job that has
    # written its limit's worth of files would seem to have none left.
    cached = sum(int(statistics.get(f"{total}{kind}_file", 0)) for kind in ("active", "inactive"))
    return most - taken + cached


def default_snapshot_bytes(ranks: int, free: Callable[[], int] = free_memory) -> int:
    """The host memory that a snapshot may take on this rank: half of what is free, or the reserve.

    Args:
        ranks: that save together; they are taken to share a machine where nothing
            (``LOCAL_WORLD_SIZE``, which torchrun sets) says otherwise.
        free: bytes that this process may still take.
    """
    reserve = min(_core.reserve_bytes(), _core.reserved_bytes())
    return max(_LEAST_SNAPSHOT_BYTES, _share_of_free_memory(ranks, free), reserve)


def reserve_pool(
    bytes: int, *, device: torch.device | str | int | None = None, wait: bool = True
) -> int:
    """Makes the host memory that snapshots are copied to, so that the first one does not have to.

    For the start of a program, with the bytes of this rank's part of the state and 4 MiB for each
    of its files. The memory is kept until :func:`trim_pool`: no save and no load frees it, whatever
    their budgets are. A call never shrinks what an earlier one has made.

    No more is made than a save takes by default: half of the memory that is free on the machine and
    in the control group, shared evenly by the machine's ranks. Where that ends it early a warning
    is logged.

    Args:
        bytes: to be kept, rounded up to whole chunks: of 4 MiB, or of 16 MiB for a device.
        device: a CUDA device; the memory that this makes is page-locked for copies from devices, in
            pieces of 64 MiB. A reserve for a device replaces one without, and the other way round.
        wait: False returns at once, and a thread makes the memory quietly. A later call with the
            same number waits for it; an error goes to the log.

    Returns:
        The bytes that are there, those that a save under way has taken included.

    Raises:
        OSError: the system has no such memory; what there is stays.
        TypeError: ``bytes`` is not an integer.
        ValueError: ``bytes`` is negative; ``device`` is none of CUDA, or the build has no CUDA.
    """
    return _reserve.make(bytes, device, wait)


def leave() -> None:
    """Ends what is made quietly; for the interpreter's end."""
    _reserve.leave()


def _ordinal(device: torch.device | str | int | None) -> int:
    """Of a CUDA device, as the engine counts them; -1 is none."""
    if device is None:
        return -1
    # torch takes a number for a device of its current kind of accelerator.
    given = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if given.type != "cuda" or not _C.has_cuda:
        raise ValueError(f"device must be a CUDA device, in a build with CUDA; got {given}")
    return given.index if given.index is not None else torch.cuda.current_device()


def _chunk_bytes(ordinal: int) -> int:
    """Bytes of the chunks that saves from this device take; -1 is none."""
    return CHUNK_BYTES if ordinal < 0 else DEVICE_CHUNK_BYTES


class Reserve:
    """Makes the memory of :func:`reserve_pool`, perhaps by threads that nobody waits for.

    Args:
        free: bytes that this process may still take.
        step_bytes: how much is made before it is looked again how much is free.
    """

    def __init__(
        self, free: Callable[[], int] = free_memory, step_bytes: int = _STEP_BYTES
    ) -> None:
        self.leaving = False
        self._free = free
        self._step_bytes = step_bytes
        self._threads: list[threading.Thread] = []

    def make(self, bytes: int, device: torch.device | str | int | None, wait: bool) -> int:
        """As :func:`reserve_pool`."""
        if operator.index(bytes) < 0:
            raise ValueError(f"bytes must not be negative, got {bytes}")
        ordinal = _ordinal(device)
        chunk = _chunk_bytes(ordinal)
        # In whole chunks, or the last one would be beyond each limit.
        total = -(-bytes // chunk) * chunk
        _core.set_reserve(total, chunk)
        if wait:
            return self._grow(total, ordinal, None)
        thread = threading.Thread(
            target=self._grow_quietly,
            args=(total, ordinal),
            name="torch_ckpt reserve",
            daemon=True,
        )
        thread.start()
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        return _core.reserved_bytes()

    def join(self) -> None:
        """Waits for what is made quietly."""
        for thread in self._threads:
            thread.join()

    def leave(self) -> None:
        """Ends what is made quietly, and what would be later."""
        self.leaving = True
        self.join()

    def forget_in_child(self) -> None:
        """Threads are their parent's."""
        self.leaving = False
        self._threads = []

    def _grow(self, total: int, device: int, background: Background | None) -> int:
        there = _core.reserved_bytes()
        # A smaller reserve than was set is one that was trimmed, or had no memory.
        while there < total <= _core.reserve_bytes() and not self.leaving:
            ranks = dist.get_world_size() if dist.is_initialized() else 1
            most = _share_of_free_memory(ranks, self._free)
            if most < there + _chunk_bytes(device):
                _core.end_reserve()
                LOGGER.warning(
                    "%d of %d bytes are reserved for saves: this rank's share of the free memory, "
                    "half of what the machine and the control group have, is %d bytes",
                    there,
                    total,
                    most,
                )
                break
            step = min(total, most, there + self._step_bytes)
            there = _core.grow_reserve(step, device, background)
        return there

    def _grow_quietly(self, total: int, device: int) -> None:
        try:
            self._grow(total, device, Background())
        except Exception as error:
            LOGGER.warning("not all of %d bytes could be reserved for saves: %s", total, error)


_reserve = Reserve()
register(Part.MEMORY, in_child=_reserve.forget_in_child)
