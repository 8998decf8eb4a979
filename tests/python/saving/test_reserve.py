"""torch_ckpt.reserve_pool: memory that is allocated before the first save and kept."""

from __future__ import annotations

import errno
import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
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
from torch_ckpt import Background, WriteOptions, _core
from torch_ckpt.options import CHUNK_BYTES
from torch_ckpt.saving import host_memory
from torch_ckpt.saving.host_memory import Reserve, trim_pool


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
    torch_ckpt.async_save(_state, path, options=WriteOptions(**options)).result()


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


# --- trimming ------------------------------------------------------------------------------------


def test_trim_pool_frees_the_reservation_and_saves_no_longer_keep_it(tmp_path: Path) -> None:
    torch_ckpt.reserve_pool(5 * CHUNK_BYTES)
    trim_pool(2 * CHUNK_BYTES)
    assert _core.pool_bytes() == 2 * CHUNK_BYTES
    saved(tmp_path / "c", max_host_bytes=CHUNK_BYTES)
    assert _core.pool_bytes() == 2 * CHUNK_BYTES
    trim_pool()
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
    make(held, 50, wait=False)
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
    trim_pool()
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


def test_close_ends_a_background_reservation(held_at_the_third: Held) -> None:
    with in_thread(held_at_the_third.close):
        eventually(lambda: held_at_the_third.is_closed)
        held_at_the_third.gate.open()
    assert _core.pool_bytes() == 3 * CHUNK_BYTES, "the step that was under way, and no more"


def test_the_interpreter_can_exit_during_a_reservation() -> None:
    done = run_script(
        f"import torch_ckpt; torch_ckpt.reserve_pool({200 * CHUNK_BYTES}, wait=False)"
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "Traceback" not in done.stderr


# --- forks ---------------------------------------------------------------------------------------


def test_a_child_forked_during_a_reservation_does_not_wait(gate: Gate) -> None:
    def work() -> None:
        gate.open()
        assert torch_ckpt.reserve_pool(2 * CHUNK_BYTES) == 2 * CHUNK_BYTES
        host_memory.reserve.close()

    with calling({"mmap": gate}):
        torch_ckpt.reserve_pool(5 * CHUNK_BYTES, wait=False)
        gate.wait()
        in_fork(work)
        gate.open()
        assert torch_ckpt.reserve_pool(5 * CHUNK_BYTES) == 5 * CHUNK_BYTES


# --- for the state of a program ------------------------------------------------------------------

_MIB = 1 << 20
_ON_HOST = torch.zeros(4 * _MIB, dtype=torch.uint8)
#: 20 MiB, which need a second chunk that is not full.
_ON_DEVICE = random_tensor((20 * _MIB,), torch.uint8, 3)


@pytest.fixture
def reserve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reserve]:
    """Counts all tensors except ``_ON_HOST`` as tensors on a CUDA device. The memory that is
    reserved for them is not page-locked."""
    fresh = Reserve(free(2000 * CHUNK_BYTES))
    grow = _core.grow_reserve
    monkeypatch.setattr(host_memory, "reserve", fresh)
    monkeypatch.setattr(host_memory._C, "has_cuda", True)
    monkeypatch.setattr(host_memory, "_ordinal", lambda device: -1 if device is None else 0)
    monkeypatch.setattr(
        host_memory._core,
        "grow_reserve",
        lambda most, _device, background: grow(most, -1, background),
    )
    monkeypatch.setattr(
        host_memory,
        "_device_of",
        lambda tensor: None if tensor.is_set_to(_ON_HOST) else torch.device("cuda", 0),
    )
    yield fresh
    fresh.join()


def reserved_for(reserve: Reserve, tensors: list[Any], **options: Any) -> int:
    """Returns the MiB that are reserved for the tensors."""
    chosen = {"ranks": 1, "files": 1, "max_host_bytes": None} | options
    reserve.make_for_state(tensors, **chosen)
    reserve.join()
    assert _core.reserve_bytes() == _core.reserved_bytes() == _core.pool_bytes()
    return _core.pool_bytes() // _MIB


@pytest.mark.parametrize(
    ("tensors", "options", "expected"),
    [
        ([_ON_DEVICE], {}, 32),
        ([_ON_DEVICE, {"not": "a tensor"}, _ON_HOST, None], {}, 32),
        ([_ON_DEVICE] * 4, {"ranks": 4}, 32),
        ([_ON_DEVICE] * 4, {"files": 2}, 112),
        ([_ON_DEVICE] * 4, {"max_host_bytes": 50 * _MIB}, 48),
        ([_ON_DEVICE], {"max_host_bytes": 47 * _MIB}, 0),
        ([_ON_DEVICE], {"files": 2}, 0),
        ([_ON_DEVICE] * 4, {"ranks": 8}, 0),
        ([_ON_DEVICE] + [_ON_HOST] * 5, {}, 0),
        ([_ON_HOST] * 9, {}, 0),
        ([], {}, 0),
    ],
    ids=[
        "tensors on a device",
        "some values on the host",
        "replicas of several ranks",
        "several files",
        "more than the budget",
        "a budget too small for large chunks",
        "files smaller than a chunk",
        "a rank's part smaller than a chunk",
        "half of the bytes on the host",
        "host only",
        "no tensors",
    ],
)
def test_the_memory_for_a_state_covers_its_bytes_on_a_device_within_the_budget(
    reserve: Reserve, tensors: list[Any], options: dict[str, Any], expected: int
) -> None:
    assert reserved_for(reserve, tensors, **options) == expected


def test_a_state_is_given_no_more_than_its_share_of_the_free_memory(
    reserve: Reserve, caplog: pytest.LogCaptureFixture
) -> None:
    reserve._free = free(30 * CHUNK_BYTES)
    with caplog.at_level(logging.WARNING, "torch_ckpt"):
        assert reserved_for(reserve, [_ON_DEVICE] * 5) == 48
    assert not caplog.text, "the program has not requested a reserve"


def test_without_cuda_nothing_is_reserved_for_a_state_and_it_is_not_read(
    reserve: Reserve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory._C, "has_cuda", False)
    tensors = iter([_ON_DEVICE])
    reserve.make_for_state(tensors, ranks=1, files=1, max_host_bytes=None)
    assert next(tensors) is _ON_DEVICE
    assert reserved_for(reserve, [_ON_DEVICE]) == 0


def test_a_reserve_that_the_program_requested_is_not_replaced(reserve: Reserve) -> None:
    torch_ckpt.reserve_pool(3 * CHUNK_BYTES)
    assert reserved_for(reserve, [_ON_DEVICE]) == 3 * CHUNK_BYTES // _MIB
    reserve.limit(CHUNK_BYTES)
    assert _core.reserve_bytes() == 3 * CHUNK_BYTES


def reserve_after(staged: Future[None], reserve: Reserve) -> None:
    reserve.make_for_state([_ON_DEVICE], ranks=1, files=1, max_host_bytes=None, after=staged)


def test_a_reserve_that_the_program_requests_during_staging_is_not_replaced(
    reserve: Reserve,
) -> None:
    staged: Future[None] = Future()
    reserve_after(staged, reserve)
    torch_ckpt.reserve_pool(3 * CHUNK_BYTES)
    staged.set_result(None)
    reserve.join()
    assert _core.reserve_bytes() == _core.pool_bytes() == 3 * CHUNK_BYTES


@pytest.mark.parametrize("event", ["close", "failure", "cancellation"])
def test_nothing_is_reserved_for_a_snapshot_that_is_not_staged_in_time(
    reserve: Reserve, event: str
) -> None:
    staged: Future[None] = Future()
    reserve_after(staged, reserve)
    if event == "close":
        reserve.close()
        staged.set_result(None)
    elif event == "failure":
        staged.set_exception(OSError("the save failed"))
    else:
        staged.cancel()
    assert reserve._threads == []
    assert _core.reserve_bytes() == 0


def save_on_device(path: Path, staging: str = "blocking", budget: int | None = None) -> None:
    options = WriteOptions(thread_count=1, max_host_bytes=budget)
    torch_ckpt.async_save({"t": _ON_DEVICE}, path, staging=staging, options=options).result()


@pytest.mark.parametrize("staging", ["blocking", "overlapped"])
def test_only_the_first_async_save_reserves_memory_for_its_state(
    tmp_path: Path, reserve: Reserve, staging: str
) -> None:
    save_on_device(tmp_path / "1", staging=staging)
    reserve.join()
    assert _core.reserve_bytes() == _core.reserved_bytes() == 32 * _MIB
    trim_pool()
    save_on_device(tmp_path / "2", staging=staging)
    reserve.join()
    assert _core.reserve_bytes() == 0, "the program has freed it"


def test_a_later_save_with_a_smaller_budget_frees_the_memory_for_a_state(
    tmp_path: Path, reserve: Reserve
) -> None:
    assert reserved_for(reserve, [_ON_DEVICE]) == 32
    save_on_device(tmp_path / "c", budget=16 * _MIB)
    assert _core.reserve_bytes() <= 16 * _MIB
    assert _core.pool_bytes() <= 16 * _MIB


@pytest.mark.parametrize("call", ["mmap", "thread"])
def test_a_save_does_not_fail_if_memory_cannot_be_reserved_for_its_state(
    tmp_path: Path,
    reserve: Reserve,
    call: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EAGAIN, "out of threads")

    monkeypatch.setattr(reserve, "_start" if call == "thread" else "_grow", refuse)
    with caplog.at_level(logging.WARNING, "torch_ckpt"):
        save_on_device(tmp_path / "c")
        reserve.join()
    assert "could not reserve" in caplog.text
    assert torch_ckpt.verify(tmp_path / "c").ok


def test_no_reservation_begins_when_the_process_ends(tmp_path: Path, reserve: Reserve) -> None:
    reserve.close()
    save_on_device(tmp_path / "c")
    assert reserve._threads == []


def test_a_forked_child_reserves_memory_for_its_own_state(tmp_path: Path, reserve: Reserve) -> None:
    save_on_device(tmp_path / "parent")
    reserve.join()

    def work() -> None:
        reserve.forget_in_child()
        assert _core.reserve_bytes() == 0
        save_on_device(tmp_path / "child")
        reserve.join()
        assert _core.reserved_bytes() == 32 * _MIB

    in_fork(work)
    assert _core.reserved_bytes() == 32 * _MIB
