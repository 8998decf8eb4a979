"""Measures the processor time and the memory of a process and its descendants together.

Memory is the sum of proportional set sizes without mapped files, so a page that several of these
processes share counts once. `python -m benchmarks.processes PID` watches process PID from another
process, and answers each line on stdin with a line of JSON.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

_REPOSITORY = Path(__file__).resolve().parents[1]
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
# Fields of /proc/PID/stat, counted from the first after the command's name in parentheses.
_STATE, _PARENT, _TICKS = 0, 1, slice(11, 15)
# Lines of /proc/PID/smaps_rollup. Files are left out: unrelated processes share their code.
_KINDS = ("Pss_Anon:", "Pss_Shmem:")
_PERIOD_S = 0.01
_START, _STOP = "start", "stop"


@dataclass(frozen=True)
class Peak:
    """The highest values seen: bytes of all processes together, and number of processes."""

    bytes: int
    processes: int


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
        if not entry.isdecimal():
            continue
        fields = _stat(int(entry))
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
    ticks = 0
    for pid in tree(root):
        fields = _stat(pid)
        if fields is not None:
            ticks += sum(map(int, fields[_TICKS]))
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


class Watcher:
    """Watches this process from another process. Not thread-safe."""

    def __init__(self, requests: IO[str], answers: IO[str]) -> None:
        self._requests = requests
        self._answers = answers

    def _ask(self, request: str) -> Peak:
        print(request, file=self._requests, flush=True)
        return Peak(**json.loads(self._answers.readline()))

    def start(self) -> None:
        """Starts to watch; returns when the watcher has begun."""
        self._ask(_START)

    def stop(self) -> Peak:
        """Returns the peak since `start`."""
        return self._ask(_STOP)


@contextmanager
def watcher() -> Iterator[Watcher]:
    """Starts a process that watches this process until the context ends."""
    command = [sys.executable, "-m", f"{__package__}.processes", str(os.getpid())]
    with subprocess.Popen(
        command, cwd=_REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield Watcher(process.stdin, process.stdout)
        process.stdin.close()  # ends the watcher


def _update_peak(root: int, before: Peak) -> Peak:
    watched = [pid for pid in tree(root) if pid != os.getpid()]
    return Peak(
        bytes=max(before.bytes, sum(map(_proportional_bytes, watched))),
        processes=max(before.processes, len(watched)),
    )


def main() -> None:
    """Watches the process whose id is the argument, until stdin ends."""
    root = int(sys.argv[1])
    peak = Peak(0, 0)
    watching = False
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], _PERIOD_S if watching else None)
        if readable:
            request = sys.stdin.readline().strip()
            if not request:
                return
            watching = request == _START
            peak = Peak(0, 0) if watching else peak
        if watching or readable:
            peak = _update_peak(root, peak)
        if readable:
            print(json.dumps(asdict(peak)), flush=True)


if __name__ == "__main__":
    main()
