"""Measures the processor time and the memory of a process and its descendants together.

Memory is the sum of proportional set sizes without mapped files, so a page that several of these
processes share counts once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
# Fields of /proc/PID/stat, counted from the first after the command's name in parentheses.
_STATE, _PARENT, _TICKS = 0, 1, slice(11, 15)
# Lines of /proc/PID/smaps_rollup. Files are left out: unrelated processes share their code.
_KINDS = ("Pss_Anon:", "Pss_Shmem:")
_PERIOD_S = 0.01


@dataclass
class Peak:
    """The highest values seen: bytes of all processes together, and number of processes."""

    bytes: int = 0
    processes: int = 0


def _stat(pid: int) -> list[str] | None:
    """Returns the fields of a process after its name; None if it has ended."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return line.rpartition(")")[2].split()


def tree(root: int) -> list[int]:
    """Returns the ids of a process and of its running descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        fields = _stat(int(entry)) if entry.isdecimal() else None
        if fields is not None and fields[_STATE] != "Z":
            children.setdefault(int(fields[_PARENT]), []).append(int(entry))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def cpu_seconds(root: int) -> float:
    """Returns user and system seconds of a process, its descendants, and children they reaped.

    The kernel counts in ticks of 10 ms for each process.
    """
    stats = map(_stat, tree(root))
    ticks = sum(sum(map(int, fields[_TICKS])) for fields in stats if fields is not None)
    return ticks / _TICKS_PER_SECOND


def _proportional_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    sizes = [line.partition(":")[2] for line in text.splitlines() if line.startswith(_KINDS)]
    return sum(int(size.split()[0]) for size in sizes) * 1024


def memory_bytes(root: int) -> int:
    """Returns the resident bytes of a process and its descendants; shared pages count once."""
    return sum(map(_proportional_bytes, tree(root)))


@contextmanager
def watch() -> Iterator[Peak]:
    """Watches this process from a thread. The peak is complete when the context has ended."""
    peak, ends = Peak(), threading.Event()

    def update() -> None:
        is_last = False
        while not is_last:
            is_last = ends.wait(_PERIOD_S)
            found = tree(os.getpid())
            peak.bytes = max(peak.bytes, sum(map(_proportional_bytes, found)))
            peak.processes = max(peak.processes, len(found))

    thread = threading.Thread(target=update)
    thread.start()
    try:
        yield peak
    finally:
        ends.set()
        thread.join()
