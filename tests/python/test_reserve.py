"""torch_ckpt.reserve_pool: memory that is there before the first save, and stays."""

from __future__ import annotations

import errno
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ckpt
from tests import under_strace
from tests.support import random_tensor
from torch_ckpt import _C, host_memory
from torch_ckpt.background import Background
from torch_ckpt.writer import CHUNK_BYTES

#: No wait here is meant to be long, in seconds.
LIMIT = 60.0


@pytest.fixture(autouse=True, scope="module")
def no_earlier_saves() -> None:
    """Saves of earlier modules' tests that still end would put their memory into the pool."""
    for thread in threading.enumerate():
        if thread.name in ("torch_ckpt save", "torch_ckpt call", "torch_ckpt reserve"):
            thread.join(LIMIT)
    gc.collect()


@pytest.fixture(autouse=True)
def empty_pool() -> Iterator[None]:
    _C.trim_pool(0)
    yield
    host_memory.leave()
    host_memory._makers.forget_in_child()
    _C.trim_pool(0)


def free(monkeypatch: pytest.MonkeyPatch, amount: int) -> None:
    """Lets so many bytes be free beside the pool's."""
    monkeypatch.setattr(host_memory, "_free_memory", lambda: amount - _C.pool_bytes())
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def test_so_much_is_there_in_whole_chunks() -> None:
    assert torch_ckpt.reserve_pool(5 * CHUNK_BYTES + 1) == 6 * CHUNK_BYTES
    assert _C.pool_bytes() == 6 * CHUNK_BYTES


def test_nothing_is_reserved_for_nothing() -> None:
    assert torch_ckpt.reserve_pool(0) == 0
    assert _C.pool_bytes() == 0


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        torch_ckpt.reserve_pool(-1)


def test_a_fraction_is_refused() -> None:
    amount: Any = 2e9
    with pytest.raises(TypeError, match="float"):
        torch_ckpt.reserve_pool(amount)


@pytest.mark.parametrize("device", ["cpu", torch.device("meta")])
def test_only_cuda_devices_have_memory_page_locked(device: torch.device | str) -> None:
    with pytest.raises(ValueError, match="device must be one of CUDA"):
        torch_ckpt.reserve_pool(CHUNK_BYTES, device=device)
    assert _C.reserve_bytes() == 0


def test_a_second_call_makes_only_what_is_missing() -> None:
    torch_ckpt.reserve_pool(2 * CHUNK_BYTES)
    assert torch_ckpt.reserve_pool(5 * CHUNK_BYTES) == 5 * CHUNK_BYTES
    assert _C.pool_bytes() == 5 * CHUNK_BYTES


def test_a_smaller_number_frees_nothing() -> None:
    torch_ckpt.reserve_pool(5 * CHUNK_BYTES)
    torch_ckpt.reserve_pool(2 * CHUNK_BYTES)
    assert _C.pool_bytes() == 5 * CHUNK_BYTES


# --- saves and loads -----------------------------------------------------------------------------

_state = {"t": random_tensor((3, CHUNK_BYTES), torch.uint8, 1)}
# The file is a little larger than its tensor.
_state_chunks = 4
_begun = threading.Event()


def _save_first(directory: str | Path, staging: str, reserve: bool) -> None:
    # What under_strace does before it looks.
    if not _begun.is_set():
        _begun.set()
        torch_ckpt.async_save({"t": torch.ones(3)}, Path(directory) / "small").result()
        if reserve:
            torch_ckpt.reserve_pool(_state_chunks * CHUNK_BYTES)
        return
    options: Any = {"staging": staging, "thread_count": 1}
    torch_ckpt.async_save(_state, Path(directory) / "c", **options).result()


@pytest.mark.parametrize("staging", ["blocking", "overlapped"])
@pytest.mark.parametrize("reserve", [True, False])
def test_the_first_save_makes_no_memory(tmp_path: Path, staging: str, reserve: bool) -> None:
    outcome = under_strace.run(_save_first, tmp_path, staging, reserve, trace="mmap")
    assert outcome.error is None
    maps = [call.arguments for call in outcome.calls if "MAP_ANONYMOUS" in call.arguments]
    sizes = [int(arguments.split(", ")[1]) for arguments in maps if "MAP_STACK" not in arguments]
    chunks = [size for size in sizes if CHUNK_BYTES <= size < 2 * CHUNK_BYTES]
    # Where nothing was reserved, it is seen to be made.
    assert bool(chunks) != reserve


def test_a_save_with_a_smaller_budget_leaves_it(tmp_path: Path) -> None:
    torch_ckpt.reserve_pool(5 * CHUNK_BYTES)
    torch_ckpt.async_save(_state, tmp_path / "c", max_host_bytes=CHUNK_BYTES).result()
    assert _C.pool_bytes() == 5 * CHUNK_BYTES


def test_a_save_without_a_budget_leaves_it(tmp_path: Path) -> None:
    torch_ckpt.reserve_pool(5 * CHUNK_BYTES)
    torch_ckpt.async_save(_state, tmp_path / "c", thread_count=1).result()
    assert _C.pool_bytes() == 5 * CHUNK_BYTES


def test_a_load_leaves_it(tmp_path: Path) -> None:
    torch_ckpt.save(_state, tmp_path / "c")
    torch_ckpt.reserve_pool(20 * CHUNK_BYTES)
    torch_ckpt.load({"t": torch.empty_like(_state["t"])}, tmp_path / "c")
    assert _C.pool_bytes() == 20 * CHUNK_BYTES


def test_torchs_async_save_leaves_it(tmp_path: Path) -> None:
    torch_ckpt.reserve_pool(5 * CHUNK_BYTES)
    staged = torch_ckpt.FileSystemWriter(tmp_path).stage(_state)
    assert _C.reserved_bytes() == 5 * CHUNK_BYTES
    del staged
    assert _C.reserved_bytes() == 5 * CHUNK_BYTES


def test_saves_may_take_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_ckpt.reserve_pool(50 * CHUNK_BYTES)
    free(monkeypatch, 0)
    assert host_memory.default_snapshot_bytes(1) == 50 * CHUNK_BYTES


# --- limits --------------------------------------------------------------------------------------


def test_no_more_is_made_than_half_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free(monkeypatch, 20 * CHUNK_BYTES)
    with caplog.at_level(logging.WARNING, "torch_ckpt"):
        assert torch_ckpt.reserve_pool(50 * CHUNK_BYTES) == 10 * CHUNK_BYTES
    assert f"{10 * CHUNK_BYTES} of {50 * CHUNK_BYTES} bytes are reserved" in caplog.text
    assert _C.reserve_bytes() == 10 * CHUNK_BYTES, "saves keep no more than was made"


def test_ranks_of_a_machine_share_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 40 * CHUNK_BYTES)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert torch_ckpt.reserve_pool(50 * CHUNK_BYTES) == 5 * CHUNK_BYTES


@pytest.mark.parametrize(
    ("limit", "used", "total"),
    [
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ],
    ids=["version 2", "version 1"],
)
def test_the_control_groups_limit_counts_and_its_cached_files_do_not(
    limit: str, used: str, total: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / limit).write_text(f"{30 * CHUNK_BYTES}\n")
    (tmp_path / used).write_text(f"{25 * CHUNK_BYTES}\n")
    (tmp_path / "memory.stat").write_text(
        f"anon 5\n{total}inactive_file {10 * CHUNK_BYTES}\n{total}active_file {5 * CHUNK_BYTES}\n"
    )
    monkeypatch.setattr(host_memory, "_CONTROL_GROUPS", ((tmp_path, limit, used, total),))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    # The files do not move with what is made here, as a control group's would.
    assert host_memory._share_of_free_memory(1) == 10 * CHUNK_BYTES


def test_who_takes_memory_meanwhile_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_STEP_BYTES", CHUNK_BYTES)
    shares = iter([100 * CHUNK_BYTES, 100 * CHUNK_BYTES, 2 * CHUNK_BYTES])
    monkeypatch.setattr(host_memory, "_share_of_free_memory", lambda _ranks: next(shares))
    assert torch_ckpt.reserve_pool(50 * CHUNK_BYTES) == 2 * CHUNK_BYTES


def test_memory_that_the_system_does_not_have_is_an_error(tmp_path: Path) -> None:
    script = f"""
import resource, torch_ckpt
from torch_ckpt import _C
torch_ckpt.reserve_pool({CHUNK_BYTES})  # and the threads
here = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (here + {20 * CHUNK_BYTES},) * 2)
try:
    torch_ckpt.reserve_pool({100 * CHUNK_BYTES})
except OSError as error:
    print(error.errno, _C.reserve_bytes() == _C.reserved_bytes() == _C.pool_bytes())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.split() == [str(errno.ENOMEM), "True"], done.stderr


# --- trimming ------------------------------------------------------------------------------------


def test_trim_pool_frees_it_and_saves_keep_it_no_longer(tmp_path: Path) -> None:
    torch_ckpt.reserve_pool(5 * CHUNK_BYTES)
    torch_ckpt.trim_pool(2 * CHUNK_BYTES)
    assert _C.pool_bytes() == 2 * CHUNK_BYTES
    torch_ckpt.async_save(_state, tmp_path / "c", max_host_bytes=CHUNK_BYTES).result()
    assert _C.pool_bytes() == 2 * CHUNK_BYTES
    torch_ckpt.trim_pool()
    assert _C.pool_bytes() == 0


# --- in the background ---------------------------------------------------------------------------


class Held:
    """Stops whoever makes memory as he looks for the ``nth`` time how much is free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nth: int = 1) -> None:
        self.reached = threading.Event()
        self._opened = threading.Event()
        self._left = nth
        monkeypatch.setattr(host_memory, "_STEP_BYTES", CHUNK_BYTES)
        monkeypatch.setattr(host_memory, "_share_of_free_memory", self._look)

    def _look(self, _ranks: int) -> int:
        self._left -= 1
        if self._left == 0:
            self.reached.set()
            assert self._opened.wait(LIMIT), "nobody has opened it"
        return 1000 * CHUNK_BYTES

    def open(self) -> None:
        self._opened.set()


def join_makers() -> None:
    for thread in host_memory._makers._threads:
        thread.join(LIMIT)
        assert not thread.is_alive()


def test_without_waiting_it_returns_at_once_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    assert torch_ckpt.reserve_pool(3 * CHUNK_BYTES, wait=False) == 0
    assert held.reached.wait(LIMIT)
    held.open()
    join_makers()
    assert _C.pool_bytes() == 3 * CHUNK_BYTES


def test_what_goes_on_can_be_waited_for() -> None:
    torch_ckpt.reserve_pool(20 * CHUNK_BYTES, wait=False)
    assert torch_ckpt.reserve_pool(20 * CHUNK_BYTES) == 20 * CHUNK_BYTES
    join_makers()
    assert _C.pool_bytes() == 20 * CHUNK_BYTES


@pytest.mark.parametrize("wait", [True, False])
def test_only_who_does_not_wait_gets_quiet_threads(
    monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    by: list[Background | None] = []
    grow = _C.grow_reserve

    def look(most: int, device: int, background: Background | None) -> int:
        by.append(background)
        return grow(most, device, background)

    monkeypatch.setattr(_C, "grow_reserve", look)
    torch_ckpt.reserve_pool(CHUNK_BYTES, wait=wait)
    join_makers()
    assert by == [None if wait else Background()]


def test_trim_pool_ends_what_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch, nth=3)
    torch_ckpt.reserve_pool(50 * CHUNK_BYTES, wait=False)
    assert held.reached.wait(LIMIT)
    assert _C.pool_bytes() == 2 * CHUNK_BYTES
    torch_ckpt.trim_pool()
    held.open()
    join_makers()
    assert _C.pool_bytes() == 0


def test_a_failure_that_nobody_waits_for_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(_C, "grow_reserve", fail)
    with caplog.at_level(logging.WARNING, "torch_ckpt"):
        torch_ckpt.reserve_pool(CHUNK_BYTES, wait=False)
        join_makers()
    assert f"not all of {CHUNK_BYTES} bytes could be reserved" in caplog.text
    assert "no memory" in caplog.text


def test_leaving_ends_what_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch, nth=3)
    torch_ckpt.reserve_pool(50 * CHUNK_BYTES, wait=False)
    assert held.reached.wait(LIMIT)
    # As leave() does before it waits.
    host_memory._makers.leaving = True
    held.open()
    host_memory.leave()
    assert _C.pool_bytes() == 3 * CHUNK_BYTES, "the step that was under way, and no more"


def test_the_interpreter_leaves_amid_it() -> None:
    script = f"import torch_ckpt; torch_ckpt.reserve_pool({200 * CHUNK_BYTES}, wait=False)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "Traceback" not in done.stderr


# --- forks ---------------------------------------------------------------------------------------


def in_fork(work: Callable[[], bool]) -> bool:
    """Whether it was so in a forked child, whose failures are not the test's own."""
    with warnings.catch_warnings():
        # Since Python 3.12: that there are threads, which is what this is about.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(int(LIMIT))
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_forked_child_has_none_and_makes_its_own(tmp_path: Path) -> None:
    torch_ckpt.reserve_pool(5 * CHUNK_BYTES)

    def work() -> bool:
        begun = (_C.reserve_bytes(), _C.reserved_bytes(), _C.pool_bytes())
        made = torch_ckpt.reserve_pool(4 * CHUNK_BYTES)
        torch_ckpt.async_save(_state, tmp_path / "c", max_host_bytes=CHUNK_BYTES).result()
        return begun == (0, 0, 0) and made == _C.pool_bytes() == 4 * CHUNK_BYTES

    assert in_fork(work)
    assert _C.pool_bytes() == 5 * CHUNK_BYTES


def test_a_child_that_is_forked_amid_it_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    torch_ckpt.reserve_pool(5 * CHUNK_BYTES, wait=False)
    assert held.reached.wait(LIMIT)

    def work() -> bool:
        host_memory.leave()
        host_memory._makers.leaving = False
        return torch_ckpt.reserve_pool(2 * CHUNK_BYTES) == 2 * CHUNK_BYTES

    assert in_fork(work)
    held.open()
    join_makers()
    assert _C.pool_bytes() == 5 * CHUNK_BYTES
