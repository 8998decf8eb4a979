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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from . import fresh_process
from .contenders import (
    SAVERS,
    BackgroundSaver,
    Saver,
    background_savers,
    our_background_saver,
    our_saver_with_budget,
)
from .states import State, payload_bytes, small_tensors_state, training_state

BUDGET_BYTES = 16 << 20
MEASURED_SAVERS: tuple[tuple[str, int | None], ...] = (
    ("stock_1", None),
    ("ours_dcp", None),
    ("ours_dcp", BUDGET_BYTES),
)
# Staging that is to free the trainer early needs more than the few chunks of a synchronous save.
BACKGROUND_BUDGET_BYTES = 256 << 20
MEASURED_BACKGROUND_SAVERS: tuple[tuple[str, int | None], ...] = (
    ("stock_thread", None),
    ("ours_blocking", None),
    ("ours_blocking", BACKGROUND_BUDGET_BYTES),
    ("ours_overlapped", None),
    ("ours_overlapped", BACKGROUND_BUDGET_BYTES),
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


def _waiting(saver: BackgroundSaver) -> Saver:
    def save(state: State, path: Path) -> None:
        running = saver.start(state, path)
        running.committed.result()

    return Saver(saver.label, saver.kind, save)


def _saver(name: str, budget_bytes: int | None, background: dict[str, BackgroundSaver]) -> Saver:
    if budget_bytes is None:
        return SAVERS[name] if name in SAVERS else _waiting(background[name])
    if name == "ours_dcp":
        return our_saver_with_budget(budget_bytes)
    if name == "ours_blocking":
        return _waiting(our_background_saver("blocking", budget_bytes))
    if name == "ours_overlapped":
        return _waiting(our_background_saver("overlapped", budget_bytes))
    raise ValueError(f"{name} takes no byte budget")


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
    arguments = [name, "--size", str(state_bytes), "--tensors", str(tensor_count)]
    arguments += ["--dir", str(directory.resolve()), "--round", str(round_index)]
    if budget_bytes is not None:
        arguments += ["--budget", str(budget_bytes)]
    try:
        return MemorySample(**fresh_process.run("memory", arguments))
    except fresh_process.FreshProcessError as error:
        if PeakResetError.__name__ in str(error):
            raise PeakResetError(str(error).strip().splitlines()[-1]) from error
        raise


def main() -> None:
    """Measures one saver in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("saver")
    parser.add_argument("--size", type=int, required=True, help="bytes of the state")
    parser.add_argument("--tensors", type=int, required=True)
    parser.add_argument("--dir", type=Path, required=True, help="an existing directory")
    parser.add_argument("--budget", type=int, help="max_host_bytes in bytes")
    parser.add_argument("--round", type=int, default=0)
    arguments = parser.parse_args()

    path: Path = arguments.dir / "memory"
    with background_savers() as background:
        saver = _saver(arguments.saver, arguments.budget, background)
        state = training_state(arguments.size, arguments.tensors)
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
