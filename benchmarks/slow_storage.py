"""Simulates storage that is slower than the network between ranks, such as a shared file system.

The kernel's block I/O controller (cgroup v1 or v2) limits the reads of this process and its
descendants from the device of a directory. This needs root.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_V1 = Path("/sys/fs/cgroup/blkio")
_V2 = Path("/sys/fs/cgroup")


class NoLimitError(Exception):
    """The system cannot limit reads. The message has the reason."""


def _device_of(directory: Path) -> str:
    """Returns the number of the whole disk, because the controller knows no partitions."""
    number = directory.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    if (device / "partition").exists():
        device = device.parent
    try:
        return (device / "dev").read_text().strip()
    except OSError as error:
        raise NoLimitError(f"{directory} is not on a block device") from error


def _family(process: int) -> list[str]:
    """Returns a process and its descendants, such as the server that forks ranks."""
    family = [str(process)]
    for task in Path(f"/proc/{process}/task").iterdir():
        for child in (task / "children").read_text().split():
            family += _family(int(child))
    return family


def _move(processes: list[str], group: Path) -> None:
    for process in processes:
        with suppress(ProcessLookupError):  # it may have ended
            (group / "cgroup.procs").write_text(process)


@contextmanager
def limited_reads(directory: Path, bytes_per_second: int) -> Iterator[None]:
    """Limits the total reads of this process and its descendants while the context is open.

    Raises:
        NoLimitError: the system cannot limit reads.
    """
    is_v1 = (_V1 / "blkio.throttle.read_bps_device").exists()
    root = _V1 if is_v1 else _V2
    group = root / f"torch_ckpt-{os.getpid()}"
    device = _device_of(directory)
    try:
        group.mkdir()
        if is_v1:
            limit = f"{device} {bytes_per_second}"
            (group / "blkio.throttle.read_bps_device").write_text(limit)
        else:
            (group / "io.max").write_text(f"{device} rbps={bytes_per_second}")
        _move(_family(os.getpid()), group)
    except OSError as error:
        if group.exists():
            group.rmdir()
        raise NoLimitError(f"cannot limit reads by a cgroup: {error}") from error
    try:
        yield
    finally:
        _move((group / "cgroup.procs").read_text().split(), root)
        group.rmdir()
