"""What a process and all processes below it take together: processor time and memory.

Memory is the sum of the proportional set sizes of all that is no file: a page that several of the
processes have in common counts once. `python -m benchmarks.processes PID` watches a process from
outside, on no thread of that: it answers each line on its stdin with a line of JSON.
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
# Of a line of /proc/PID/stat, counted from behind the command's name in parentheses.
_STATE, _PARENT, _TICKS = 0, 1, slice(11, 15)
# Of /proc/PID/smaps_rollup. Not files: processes that have nothing to do with it share their code.
_KINDS = ("Pss_Anon:", "Pss_Shmem:")
_PERIOD_S = 0.01
_START, _STOP = "start", "stop"


@dataclass(frozen=True)
class Peak:
    """The most that was seen: bytes of all processes together, and how many these were."""

    bytes: int
    processes: int


def _stat(pid: int) -> list[str] | None:
    """The fields of a process; None where it has gone."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return line.rpartition(")")[2].split()


def tree(root: int) -> list[int]:
    """The ids of a process and of all processes below it that run."""
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
    """User and system seconds of these processes and of those that they have waited for.

    The kernel counts in ticks of 10 ms, for each process.
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
    """Bytes that these processes have resident, with what they share counted once."""
    return sum(map(_proportional_bytes, tree(root)))


class Watcher:
    """Watches this process from another one. Not thread-safe: one thread uses it."""

    def __init__(self, requests: IO[str], answers: IO[str]) -> None:
        self._requests = requests
        self._answers = answers

    def _ask(self, request: str) -> Peak:
        print(request, file=self._requests, flush=True)
        return Peak(**json.loads(self._answers.readline()))

    def start(self) -> None:
        """Returns when watching has begun."""
        self._ask(_START)

    def stop(self) -> Peak:
        """Returns what was seen since `start`."""
        return self._ask(_STOP)


@contextmanager
def watcher() -> Iterator[Watcher]:
    """A watcher of this process that lives until the context ends."""
    command = [sys.executable, "-m", f"{__package__}.processes", str(os.getpid())]
    with subprocess.Popen(
        command, cwd=_REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield Watcher(process.stdin, process.stdout)
        # It ends with its input.
        process.stdin.close()


def _look(root: int, before: Peak) -> Peak:
    watched = [pid for pid in tree(root) if pid != os.getpid()]
    return Peak(
        bytes=max(before.bytes, sum(map(_proportional_bytes, watched))),
        processes=max(before.processes, len(watched)),
    )


def main() -> None:
    """Watches the process that is named in the arguments, until stdin ends."""
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
            peak = _look(root, peak)
        if readable:
            print(json.dumps(asdict(peak)), flush=True)


if __name__ == "__main__":
    main()
