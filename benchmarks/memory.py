"""Measures the memory that a save or load needs beyond the state, in a fresh process for each.

The growth is the process's peak resident size during the call minus its size just before. Before
the call only stock code has saved or loaded in the process, to warm up imports and torch's caches.
So the buffers and threads of the measured saver or loader count in full.

A load starts with a cold page cache if the file system permits it, because reads that bypass the
cache need buffers. The memory of its targets was touched before, so it is not growth.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import pagecache
from .contenders import (
    LOADERS,
    SAVERS,
    BackgroundSaver,
    background_savers,
    our_background_saver,
    our_saver,
)
from .states import small_tensors_state, tensors, training_state, wipe

_BUDGET_BYTES = 16 << 20
# Staging that releases training early needs more chunks than a synchronous save.
_BACKGROUND_BUDGET_BYTES = 256 << 20
#: Savers and loaders to measure, with their budgets; None is the default.
SAVERS_MEASURED = (("stock_1", None), ("ours_dcp", None), ("ours_dcp", _BUDGET_BYTES))
LOADERS_MEASURED = (
    *(("stock", None), ("stock_threads", None)),
    *(("ours_dcp", None), ("ours_budget", None)),
)
BACKGROUND_SAVERS_MEASURED = (
    ("stock_thread", None),
    *(("ours_blocking", None), ("ours_blocking", _BACKGROUND_BUDGET_BYTES)),
    *(("ours_overlapped", None), ("ours_overlapped", _BACKGROUND_BUDGET_BYTES)),
)


class PeakResetError(RuntimeError):
    """The kernel does not let this process reset its peak resident size."""


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == field:
            return int(value.split()[0]) * 1024
    raise LookupError(f"/proc/self/status has no {field}")


def trim() -> None:
    """Frees the memory that Python and malloc keep, which would hide as much growth."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def measure_growth(call: Callable[[], object]) -> tuple[int, int]:
    """Returns (resident bytes before, peak resident bytes during) one `call` in this process."""
    trim()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        raise PeakResetError(f"/proc/self/clear_refs: {error}") from error
    before = _status_bytes("VmRSS")
    call()
    return before, _status_bytes("VmHWM")


def measure(
    name: str, budget: int | None, size: int, count: int, directory: str, source: str | None
) -> dict[str, Any]:
    """Measures a saver in this process; with a checkpoint `source`, a loader."""
    path = Path(directory) / "memory"
    state = training_state(size, count)
    small = small_tensors_state(2)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, path, ignore_errors=True)
        SAVERS["stock_1"].save(small, path / "warm-up")
        if source is None:
            saver = _saver(name, budget, stack.enter_context(background_savers()))
            before, peak = measure_growth(lambda: _save(saver, state, path / "measured"))
            return {"label": saver.label, "kind": saver.kind, "growth_bytes": peak - before}
        loader = LOADERS[name]
        LOADERS["stock"].load(small, path / "warm-up")
        wipe(state)
        # Some file systems consist of page cache only.
        with contextlib.suppress(pagecache.CacheStateError):
            pagecache.evict([file for file in Path(source).rglob("*") if file.is_file()])
        before, peak = measure_growth(lambda: loader.load(state, Path(source)))
        if not all(map(torch.count_nonzero, tensors(state))):
            raise RuntimeError(f"{loader.label} left a tensor at zero")
        return {"label": loader.label, "kind": loader.kind, "growth_bytes": peak - before}


def _saver(name: str, budget: int | None, background: dict[str, BackgroundSaver]) -> Any:
    if budget is None:
        return SAVERS[name] if name in SAVERS else background[name]
    if name == "ours_dcp":
        return our_saver(budget)
    return our_background_saver(name.removeprefix("ours_"), budget)


def _save(saver: Any, state: dict[str, Any], path: Path) -> None:
    if isinstance(saver, BackgroundSaver):
        saver.start(state, path).committed.result()
    else:
        saver.save(state, path)
