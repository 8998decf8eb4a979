"""torch_ckpt.async_save: interpreters that end, children that are forked, signals."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import torch_ckpt
from tests.background_saves import SEEN, assert_checkpoint, large, trained, unwritable
from tests.fault_hooks import before
from tests.forked import Answering, end_of, in_fork, run_script
from tests.gates import LIMIT, Gate
from torch_ckpt import CheckpointError

# torch warns of every checkpoint that is replaced.
pytestmark = [
    pytest.mark.usefixtures("no_save_left"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]


# --- the end of the interpreter ------------------------------------------------------------------


LEAVES_EARLY = """
import atexit, sys, threading, torch, torch_ckpt
leaving = threading.Event()
atexit.register(leaving.set)  # which is before what has been registered before
def hold(checkpoint):
    leaving.wait()
    print("on_commit")
handle = torch_ckpt.async_save({"t": torch.arange(9)}, sys.argv[1], on_commit=hold)
print("done" if handle.done() else "under way")
"""


def test_the_interpreter_waits_for_the_save_at_exit(tmp_path: Path) -> None:
    done = run_script(LEAVES_EARLY, tmp_path / "c")
    assert (done.returncode, done.stdout, done.stderr) == (0, "under way\non_commit\n", "")


LEAVES_AN_ERROR = """
import sys, torch, torch_ckpt
handle = torch_ckpt.async_save({"t": torch.ones(3)}, sys.argv[1])
"""


def test_the_interpreter_logs_an_unreported_error_at_exit(tmp_path: Path) -> None:
    path = unwritable(tmp_path)
    done = run_script(LEAVES_AN_ERROR, path)
    assert done.returncode == 0
    assert f"the save to {path} failed: " in done.stderr
    assert "File exists" in done.stderr


LEAVES_A_SAVE_THAT_HANGS = """
import sys, threading, torch, torch_ckpt
torch_ckpt._base.exit_threads.EXIT_LIMIT_SECONDS = 0.05
reached = threading.Event()
def hang(checkpoint):
    reached.set()
    threading.Event().wait()
handle = torch_ckpt.async_save({"t": torch.ones(3)}, sys.argv[1], on_commit=hang)
# A thread that comes back from the engine while the interpreter ends would end the process.
reached.wait()
"""


def test_the_interpreter_waits_no_longer_than_the_limit_at_exit(tmp_path: Path) -> None:
    done = run_script(LEAVES_A_SAVE_THAT_HANGS, tmp_path / "c")
    assert done.returncode == 0
    assert f"the save to {tmp_path / 'c'} did not end within" in done.stderr


SEES_AN_ERROR = """
import sys, torch, torch_ckpt
from torch.distributed.checkpoint.api import CheckpointException
try:
    torch_ckpt.async_save({"t": torch.ones(3)}, sys.argv[1]).result()
except CheckpointException:
    print("seen")
"""


def test_a_reported_error_is_not_logged_at_exit(tmp_path: Path) -> None:
    done = run_script(SEES_AN_ERROR, unwritable(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "seen\n", "")


# --- forks and signals ---------------------------------------------------------------------------


@pytest.mark.parametrize("way", SEEN)
def test_a_forked_child_does_not_take_part_in_the_save_and_can_make_its_own(
    tmp_path: Path, held_before_commit: Gate, way: str
) -> None:
    handle = torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c")

    def ask() -> None:
        with pytest.raises(CheckpointError, match="the process that forked this one"):
            SEEN[way](handle)
        torch_ckpt.check_for_errors()
        torch_ckpt.async_save({"t": torch.zeros(3)}, tmp_path / "child").result()

    in_fork(ask)
    held_before_commit.open()
    handle.result()
    assert_checkpoint(tmp_path / "c", {"t": torch.ones(3)})
    assert_checkpoint(tmp_path / "child", {"t": torch.zeros(3)})


def test_a_guarded_step_of_a_forked_child_does_not_wait(tmp_path: Path, held: Gate) -> None:
    model, optimizer = trained(torch.optim.SGD)
    handle = torch_ckpt.async_save({"model": model}, tmp_path / "c", staging="overlapped")
    handle.guard(optimizer)
    in_fork(optimizer.step)
    held.open()
    handle.result()


def test_a_forked_child_sees_that_a_save_has_ended(tmp_path: Path) -> None:
    handle = torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c")
    handle.result()
    in_fork(handle.result)


LEAVES_IN_A_FORK = """
import os, sys, threading, torch, torch_ckpt
opened, reached = threading.Event(), threading.Event()
def hold(checkpoint):
    reached.set()
    opened.wait()
handle = torch_ckpt.async_save({"t": torch.ones(3)}, sys.argv[1], on_commit=hold)
reached.wait()
child = os.fork()
if child == 0:
    sys.exit(7)
_, status = os.waitpid(child, 0)
opened.set()
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_exits_without_waiting(tmp_path: Path) -> None:
    done = run_script(LEAVES_IN_A_FORK, tmp_path / "c")
    assert (done.returncode, done.stderr) == (7, "")
    assert_checkpoint(tmp_path / "c", {"t": torch.ones(3)})


def test_workers_of_a_data_loader_start_during_a_save(
    tmp_path: Path, held_before_commit: Gate
) -> None:
    state = {"t": large()}
    handle = torch_ckpt.async_save(state, tmp_path / "c")
    loader: Any = DataLoader(list(range(8)), num_workers=2, timeout=LIMIT)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert [int(batch) for batch in loader] == list(range(8))
    held_before_commit.open()
    handle.result()
    assert_checkpoint(tmp_path / "c", state)


@pytest.mark.parametrize(
    "moment", ["pwrite", "files are written"], ids=["writing", "before the commit"]
)
def test_sigterm_during_a_save_keeps_the_old_checkpoint(tmp_path: Path, moment: str) -> None:
    old = {"a": large(1), "b": large(2)}
    torch_ckpt.save(old, tmp_path / "c")

    def save(send: Callable[[Any], None]) -> None:
        def stop() -> None:
            send("under way")
            threading.Event().wait()

        with before(moment, stop):
            torch_ckpt.async_save({"a": large(3), "b": large(4)}, tmp_path / "c").result()

    child = Answering(save)
    assert child.answer() == "under way"
    os.kill(child.pid, signal.SIGTERM)
    assert end_of(child.pid) == -signal.SIGTERM
    assert_checkpoint(tmp_path / "c", old)
