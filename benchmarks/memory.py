"""Measures the memory that a save or load needs beyond the state, in a fresh process for each.

The growth is the process's peak resident size during the call minus its size just before. Before
the call only stock code has saved or loaded in the process, to warm up imports and torch's caches.
So the buffers and threads of the measured saver or loader count in full.

A load starts with a cold page cache if the file system permits it, because reads that bypass the
cache need buffers. The memory of its targets was touched before, so it is not growth.

`python -m benchmarks.memory SAVER ...` is the fresh process; it prints one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from . import fresh_process, pagecache
from .contenders import (
    LOAD_BUDGET_BYTES,
    LOADERS,
    SAVERS,
    BackgroundSaver,
    Loader,
    Saver,
    background_savers,
    our_background_saver,
    our_saver_with_budget,
)
from .states import State, payload_bytes, small_tensors_state, tensors, training_state, wipe

BUDGET_BYTES = 16 << 20
MEASURED_SAVERS: tuple[tuple[str, int | None], ...] = (
    ("stock_1", None),
    ("ours_dcp", None),
    ("ours_dcp", BUDGET_BYTES),
)
# Staging that releases training early needs more chunks than a synchronous save.
BACKGROUND_BUDGET_BYTES = 256 << 20
MEASURED_BACKGROUND_SAVERS: tuple[tuple[str, int | None], ...] = (
    ("stock_thread", None),
    ("ours_blocking", None),
    ("ours_blocking", BACKGROUND_BUDGET_BYTES),
    ("ours_overlapped", None),
    ("ours_overlapped", BACKGROUND_BUDGET_BYTES),
)


MEASURED_LOADERS: tuple[tuple[str, int | None], ...] = (
    ("stock", None),
    ("stock_threads", None),
    ("ours_dcp", None),
    ("ours_dcp", LOAD_BUDGET_BYTES),
)
# Distinguishes the name of a loader from the name of a saver.
LOAD_PREFIX = "load_"


class PeakResetError(RuntimeError):
    """The kernel does not let this process reset its peak resident size."""


@dataclass(frozen=True)
class MemorySample:
    """Growth of one process. Sizes are in bytes.

    `budget_bytes` is max_host_bytes of a save or max_inflight_bytes of a load; None: the default.
    """

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
        """Peak resident size during the call minus the size before the call."""
        return self.peak_bytes - self.before_bytes

    @property
    def is_load(self) -> bool:
        """True for a load, False for a save."""
        return self.contender.startswith(LOAD_PREFIX)


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


def measure_growth(call: Callable[[], object]) -> tuple[int, int]:
    """Returns (resident bytes before, peak resident bytes during) one `call` in this process."""
    gc.collect()
    # Freed memory that malloc keeps would count as "before" and hide as much growth.
    ctypes.CDLL(None).malloc_trim(0)
    _reset_peak()
    before = _status_bytes("VmRSS")
    call()
    return before, _status_bytes("VmHWM")


def _until_committed(saver: BackgroundSaver) -> Saver:
    def save(state: State, path: Path) -> None:
        running = saver.start(state, path)
        running.committed.result()

    return Saver(saver.label, saver.kind, save)


def _saver(name: str, budget_bytes: int | None, background: dict[str, BackgroundSaver]) -> Saver:
    if budget_bytes is None:
        return SAVERS[name] if name in SAVERS else _until_committed(background[name])
    if name == "ours_dcp":
        return our_saver_with_budget(budget_bytes)
    if name == "ours_blocking":
        return _until_committed(our_background_saver("blocking", budget_bytes))
    if name == "ours_overlapped":
        return _until_committed(our_background_saver("overlapped", budget_bytes))
    raise ValueError(f"{name} does not accept a byte budget")


def _loader(name: str, budget_bytes: int | None) -> Loader:
    if budget_bytes is None:
        return LOADERS[name]
    if (name, budget_bytes) != ("ours_dcp", LOAD_BUDGET_BYTES):
        raise ValueError(f"{name} does not accept a byte budget of {budget_bytes}")
    return LOADERS["ours_budget"]


def sample_in_fresh_process(
    name: str,
    *,
    budget_bytes: int | None,
    state_bytes: int,
    tensor_count: int,
    directory: Path,
    round_index: int,
    source: Path | None = None,
) -> MemorySample:
    """Runs this module for one saver and returns its sample.

    With a `source`, `name` is a loader, and it loads the checkpoint at `source`.
    """
    arguments = [name, "--size", str(state_bytes), "--tensors", str(tensor_count)]
    arguments += ["--dir", str(directory.resolve()), "--round", str(round_index)]
    if budget_bytes is not None:
        arguments += ["--budget", str(budget_bytes)]
    if source is not None:
        arguments += ["--load", str(source.resolve())]
    try:
        return MemorySample(**fresh_process.run("memory", arguments))
    except fresh_process.FreshProcessError as error:
        if PeakResetError.__name__ in str(error):
            raise PeakResetError(str(error).strip().splitlines()[-1]) from error
        raise


def _measure_save(
    name: str, budget: int | None, state: State, path: Path
) -> tuple[str, str, int, int]:
    with background_savers() as background:
        saver = _saver(name, budget, background)
        SAVERS["stock_1"].save(small_tensors_state(2), path / "warm-up")
        growth = measure_growth(lambda: saver.save(state, path / "measured"))
    return saver.label, saver.kind, *growth


def _measure_load(
    name: str, budget: int | None, state: State, path: Path, source: Path
) -> tuple[str, str, int, int]:
    loader = _loader(name, budget)
    small = small_tensors_state(2)
    SAVERS["stock_1"].save(small, path / "warm-up")
    LOADERS["stock"].load(small, path / "warm-up")
    wipe(state)
    # Some file systems consist of page cache only.
    with contextlib.suppress(pagecache.CacheStateError):
        pagecache.evict([file for file in source.rglob("*") if file.is_file()])
    growth = measure_growth(lambda: loader.load(state, source))
    if not all(map(torch.count_nonzero, tensors(state))):
        raise RuntimeError(f"{loader.label} left a tensor at zero")
    return loader.label, loader.kind, *growth


def main() -> None:
    """Measures one saver or loader in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", help="a saver; with --load a loader")
    parser.add_argument("--size", type=int, required=True, help="bytes of the state")
    parser.add_argument("--tensors", type=int, required=True)
    parser.add_argument("--dir", type=Path, required=True, help="an existing directory")
    parser.add_argument("--budget", type=int, help="max_host_bytes or max_inflight_bytes")
    parser.add_argument("--load", type=Path, help="the checkpoint to load")
    parser.add_argument("--round", type=int, default=0)
    arguments = parser.parse_args()

    path: Path = arguments.dir / "memory"
    name, budget = arguments.contender, arguments.budget
    state = training_state(arguments.size, arguments.tensors)
    try:
        if arguments.load:
            measured = _measure_load(name, budget, state, path, arguments.load)
        else:
            measured = _measure_save(name, budget, state, path)
    finally:
        shutil.rmtree(path, ignore_errors=True)
    label, kind, before, peak = measured
    sample = MemorySample(
        contender=LOAD_PREFIX + name if arguments.load else name,
        label=label,
        kind=kind,
        round=arguments.round,
        budget_bytes=budget,
        state_bytes=payload_bytes(state),
        before_bytes=before,
        peak_bytes=peak,
    )
    print(json.dumps(asdict(sample)))


if __name__ == "__main__":
    main()
