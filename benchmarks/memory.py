"""Memory that a save needs beyond the state itself, measured in a fresh process per save.

The growth is the process's peak resident size during the save less its size just before. Only stock
code has saved anything in the process by then, which warms the imports and torch's own caches; the
buffers and threads of the measured saver are made by the measured save and so count in full.

`python -m benchmarks.memory SAVER ...` is that fresh process; it prints one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from .contenders import SAVERS, Saver, our_saver_with_budget
from .states import payload_bytes, small_tensors_state, training_state

BUDGET_BYTES = 16 << 20
MEASURED_SAVERS: tuple[tuple[str, int | None], ...] = (
    ("stock_1", None),
    ("ours_dcp", None),
    ("ours_dcp", BUDGET_BYTES),
)


class PeakResetError(RuntimeError):
    """The kernel does not let this process reset its peak resident size."""


@dataclass(frozen=True)
class MemorySample:
    """One process's growth. Sizes are bytes; `budget_bytes` is max_host_bytes, None its default."""

    contender: str
    label: str
    kind: str
    round: int
    budget_bytes: int | None
    state_bytes: int
    before_bytes: int
    peak_bytes: int

    @property
    def growth_bytes(self) -> int:
        """Peak resident size during the save, less the size before it."""
        return self.peak_bytes - self.before_bytes


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == field:
            return int(value.split()[0]) * 1024
    raise LookupError(f"/proc/self/status has no {field}")


def _reset_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        raise PeakResetError(f"/proc/self/clear_refs: {error}") from error


def measure_growth(save: Callable[[], None]) -> tuple[int, int]:
    """(resident bytes before, peak resident bytes during) one call of `save` in this process."""
    gc.collect()
    # Freed memory that malloc keeps would be counted as "before" and hide as much growth.
    ctypes.CDLL(None).malloc_trim(0)
    _reset_peak()
    before = _status_bytes("VmRSS")
    save()
    return before, _status_bytes("VmHWM")


def _saver(name: str, budget_bytes: int | None) -> Saver:
    if budget_bytes is None:
        return SAVERS[name]
    if name != "ours_dcp":
        raise ValueError(f"{name} takes no byte budget")
    return our_saver_with_budget(budget_bytes)


def sample_in_fresh_process(
    name: str,
    *,
    budget_bytes: int | None,
    state_bytes: int,
    tensor_count: int,
    directory: Path,
    round_index: int,
) -> MemorySample:
    """Runs this module for one saver and returns what it printed."""
    command = [sys.executable, "-m", "benchmarks.memory", name]
    command += ["--size", str(state_bytes), "--tensors", str(tensor_count)]
    command += ["--dir", str(directory.resolve()), "--round", str(round_index)]
    if budget_bytes is not None:
        command += ["--budget", str(budget_bytes)]
    repository = Path(__file__).resolve().parents[1]
    process = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    if process.returncode != 0:
        if PeakResetError.__name__ in process.stderr:
            raise PeakResetError(process.stderr.strip().splitlines()[-1])
        raise RuntimeError(f"memory measurement of {name} failed:\n{process.stderr}")
    return MemorySample(**json.loads(process.stdout.splitlines()[-1]))


def main() -> None:
    """Measures one saver in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("saver", choices=sorted(SAVERS))
    parser.add_argument("--size", type=int, required=True, help="bytes of the state")
    parser.add_argument("--tensors", type=int, required=True)
    parser.add_argument("--dir", type=Path, required=True, help="an existing directory")
    parser.add_argument("--budget", type=int, help="max_host_bytes in bytes")
    parser.add_argument("--round", type=int, default=0)
    arguments = parser.parse_args()

    saver = _saver(arguments.saver, arguments.budget)
    state = training_state(arguments.size, arguments.tensors)
    path: Path = arguments.dir / "memory"
    try:
        SAVERS["stock_1"].save(small_tensors_state(2), path / "warm-up")
        before, peak = measure_growth(lambda: saver.save(state, path / "measured"))
    finally:
        shutil.rmtree(path, ignore_errors=True)
    sample = MemorySample(
        contender=arguments.saver,
        label=saver.label,
        kind=saver.kind,
        round=arguments.round,
        budget_bytes=arguments.budget,
        state_bytes=payload_bytes(state),
        before_bytes=before,
        peak_bytes=peak,
    )
    print(json.dumps(asdict(sample)))


if __name__ == "__main__":
    main()
