"""torch_ckpt.reserve_pool: memory that is allocated before the first save and kept."""

from __future__ import annotations

import errno
import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ckpt
from tests.fault_hooks import calling, failing
from tests.forked import in_fork, run_script
from tests.gates import LIMIT, Gate, eventually, in_thread
from tests.support import random_tensor
from torch_ckpt import _core
from torch_ckpt.saving import host_memory
from torch_ckpt.saving.background import CHUNK_BYTES, Background
from torch_ckpt.saving.host_memory import Reserve


@pytest.fixture(autouse=True)
def empty_pool() -> Iterator[None]:
    """Waits for saves of earlier tests and collects garbage, which would return memory to the
    pool."""
    for thread in threading.enumerate():
        if thread.name in ("torch_ckpt save", "torch_ckpt call", "torch_ckpt reserve"):
            thread.join(LIMIT)
    gc.collect()
    _core.join_executor()
    _core.trim_pool(0)
    yield
    _core.trim_pool(0)


@pytest.fixture(autouse=True)
def alone_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def free(amount: int) -> Callable[[], int]:
    """Sets the bytes that are free in addition to the pool's."""
    return lambda: amount - _core.pool_bytes()


def make(reserve: Reserve, chunks: int, wait: bool = True) -> int:
    return reserve.make(chunks * CHUNK_BYTES, None, wait)


@pytest.mark.parametrize(
    ("requested", "reserved"), [((0,), 0), ((2, 5.5), 6), ((5, 2), 5)], ids=["none", "more", "less"]
)
def test_only_the_missing_bytes_are_reserved_in_whole_chunks(
    requested: tuple[float, ...], reserved: int
) -> None:
    made = [torch_ckpt.reserve_pool(int(chunks * CHUNK_BYTES)) for chunks in requested]
    assert made[-1] == _core.pool_bytes() == reserved * CHUNK_BYTES


@pytest.mark.parametrize(
    ("amount", "device", "error", "text"),
    [
        (-1, None, ValueError, "must not be negative, got -1"),
        (2e9, None, TypeError, "float"),
        (CHUNK_BYTES, "cpu", ValueError, "device must be a CUDA device"),
        (CHUNK_BYTES, torch.device("meta"), ValueError, "device must be a CUDA device"),
    ],
)
def test_a_wrong_amount_or_device_is_refused(
    amount: Any, device: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        torch_ckpt.reserve_pool(amount, device=device)
    assert _core.reserve_bytes() == 0


# --- saves and loads -----------------------------------------------------------------------------

_state = {"t": random_tensor((3, CHUNK_BYTES), torch.uint8, 1)}


def saved(path: Path, **options: Any) -> None:
    torch_ckpt.async_save(_state, path, **options).result()


def loaded(path: Path) -> None:
    torch_ckpt.load({"t": torch.empty_like(_state["t"])}, path.with_name("before"))


@pytest.mark.parametrize(
    "work",
    [saved, partial(saved, max_host_bytes=CHUNK_BYTES), loaded],
    ids=["save", "save with a smaller budget", "load"],
)
def test_saves_and_loads_keep_the_reservation(tmp_path: Path, work: Callable[[Path], None]) -> None:
    torch_ckpt.save(_state, tmp_path / "before")
    torch_ckpt.reserve_pool(20 * CHUNK_BYTES)
    work(tmp_path / "c")
    _core.join_executor()
    assert _core.pool_bytes() == 20 * CHUNK_BYTES


def test_torchs_async_save_keeps_the_reservation(tmp_path: Path) -> None:
    torch_ckpt.reserve_pool(5 * CHUNK_BYTES)
    staged = torch_ckpt.FileSystemWriter(tmp_path).stage(_state)
    assert _core.reserved_bytes() == 5 * CHUNK_BYTES
    del staged
    assert _core.reserved_bytes() == 5 * CHUNK_BYTES


def test_saves_can_use_the_entire_reservation() -> None:
    torch_ckpt.reserve_pool(50 * CHUNK_BYTES)
    assert host_memory.default_snapshot_bytes(1, free(0)) == 50 * CHUNK_BYTES


# --- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("local_ranks", "chunks"), [("1", 20), ("4", 5)])
def test_at_most_a_ranks_share_of_half_of_the_free_memory_is_reserved(
    local_ranks: str,
    chunks: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local_ranks)
    with caplog.at_level(logging.WARNING, "torch_ckpt"):
        assert make(Reserve(free(40 * CHUNK_BYTES)), 50) == chunks * CHUNK_BYTES
    assert f"reserved only {chunks * CHUNK_BYTES} of {50 * CHUNK_BYTES} bytes" in caplog.text
    assert _core.reserve_bytes() == chunks * CHUNK_BYTES, "saves keep no more than was made"


@pytest.mark.parametrize(
    ("limit", "used", "total"),
    [
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ],
    ids=["version 2", "version 1"],
)
def test_the_limit_of_the_control_group_counts_and_its_cached_files_do_not(
    limit: str, used: str, total: str, tmp_path: Path
) -> None:
    (tmp_path / limit).write_text(f"{30 * CHUNK_BYTES}\n")
    (tmp_path / used).write_text(f"{25 * CHUNK_BYTES}\n")
    (tmp_path / "memory.stat").write_text(
        f"anon 5\n{total}inactive_file {10 * CHUNK_BYTES}\n{total}active_file {5 * CHUNK_BYTES}\n"
    )
    group = (str(tmp_path), limit, used, total)
    assert host_memory.free_memory([group]) == 20 * CHUNK_BYTES


def test_memory_used_by_others_in_the_meantime_is_noticed() -> None:
    found = iter([200 * CHUNK_BYTES, 200 * CHUNK_BYTES, 4 * CHUNK_BYTES])
    reserve = Reserve(lambda: next(found) - _core.pool_bytes(), CHUNK_BYTES)
    assert make(reserve, 50) == 2 * CHUNK_BYTES


def test_memory_that_the_system_does_not_have_is_an_error() -> None:
    with (
        failing("mmap", errno.ENOMEM),
        pytest.raises(OSError, match="Cannot allocate memory") as raised,
    ):
        torch_ckpt.reserve_pool(100 * CHUNK_BYTES)
    assert raised.value.errno == errno.ENOMEM
    assert _core.reserve_bytes() == _core.reserved_bytes() == _core.pool_bytes()


# --- trimming ------------------------------------------------------------------------------------


def test_trim_pool_frees_the_reservation_and_saves_no_longer_keep_it(tmp_path: Path) -> None:
    torch_ckpt.reserve_pool(5 * CHUNK_BYTES)
    torch_ckpt.trim_pool(2 * CHUNK_BYTES)
    assert _core.pool_bytes() == 2 * CHUNK_BYTES
    saved(tmp_path / "c", max_host_bytes=CHUNK_BYTES)
    assert _core.pool_bytes() == 2 * CHUNK_BYTES
    torch_ckpt.trim_pool()
    assert _core.pool_bytes() == 0


# --- in the background ---------------------------------------------------------------------------


class Held(Reserve):
    """Blocks at the ``nth`` query of the free memory. There is one query for each chunk."""

    def __init__(self, nth: int = 1) -> None:
        super().__init__(self._look, CHUNK_BYTES)
        self.gate = Gate()
        self._left = nth

    def _look(self) -> int:
        self._left -= 1
        if self._left == 0:
            self.gate()
        return 2000 * CHUNK_BYTES


@pytest.fixture
def held_at_the_third() -> Held:
    """Makes a background reservation of many chunks that is held before the third."""
    held = Held(nth=3)
    assert make(held, 50, wait=False) == 0
    held.gate.wait()
    assert _core.pool_bytes() == 2 * CHUNK_BYTES
    return held


def test_a_call_without_waiting_returns_at_once_and_can_be_waited_for() -> None:
    held = Held()
    assert make(held, 20, wait=False) == 0
    held.gate.wait()
    held.gate.open()
    assert make(held, 20) == 20 * CHUNK_BYTES
    held.join()
    assert _core.pool_bytes() == 20 * CHUNK_BYTES


@pytest.mark.parametrize("wait", [True, False])
def test_only_a_call_without_waiting_uses_low_priority_threads(wait: bool) -> None:
    nice: list[int] = []

    def look() -> None:
        nice.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    reserve = Reserve()
    with calling({"mmap": look}):
        make(reserve, 1, wait)
        reserve.join()
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert nice == [own if wait else max(own, Background().nice)]


def test_trim_pool_ends_a_background_reservation(held_at_the_third: Held) -> None:
    torch_ckpt.trim_pool()
    held_at_the_third.gate.open()
    held_at_the_third.join()
    assert _core.pool_bytes() == 0


def test_a_failure_of_a_background_reservation_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    reserve = Reserve()
    with caplog.at_level(logging.WARNING, "torch_ckpt"), failing("mmap", errno.ENOMEM):
        make(reserve, 1, wait=False)
        reserve.join()
    assert f"could not reserve {CHUNK_BYTES} bytes" in caplog.text
    assert os.strerror(errno.ENOMEM) in caplog.text


def test_leave_ends_a_background_reservation(held_at_the_third: Held) -> None:
    with in_thread(held_at_the_third.leave):
        eventually(lambda: held_at_the_third.leaving)
        held_at_the_third.gate.open()
    assert _core.pool_bytes() == 3 * CHUNK_BYTES, "the step that was under way, and no more"


def test_the_interpreter_can_exit_during_a_reservation() -> None:
    done = run_script(
        f"import torch_ckpt; torch_ckpt.reserve_pool({200 * CHUNK_BYTES}, wait=False)"
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "Traceback" not in done.stderr


# --- forks ---------------------------------------------------------------------------------------


def test_a_forked_child_has_no_reservation_and_makes_its_own(tmp_path: Path) -> None:
    torch_ckpt.reserve_pool(5 * CHUNK_BYTES)

    def work() -> None:
        at_start = (_core.reserve_bytes(), _core.reserved_bytes(), _core.pool_bytes())
        made = torch_ckpt.reserve_pool(4 * CHUNK_BYTES)
        saved(tmp_path / "c", max_host_bytes=CHUNK_BYTES)
        assert at_start == (0, 0, 0)
        assert made == _core.pool_bytes() == 4 * CHUNK_BYTES

    in_fork(work)
    assert _core.pool_bytes() == 5 * CHUNK_BYTES


def test_a_child_forked_during_a_reservation_does_not_wait(gate: Gate) -> None:
    def work() -> None:
        gate.open()
        assert torch_ckpt.reserve_pool(2 * CHUNK_BYTES) == 2 * CHUNK_BYTES
        host_memory.leave()

    with calling({"mmap": gate}):
        torch_ckpt.reserve_pool(5 * CHUNK_BYTES, wait=False)
        gate.wait()
        in_fork(work)
        gate.open()
        assert torch_ckpt.reserve_pool(5 * CHUNK_BYTES) == 5 * CHUNK_BYTES
