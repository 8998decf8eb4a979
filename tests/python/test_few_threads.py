"""The system refuses threads to an ordinary user: what was begun ends, well or with what to do."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import select
import signal
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ckpt

#: A user of whom there are no other processes; the tests' own may be any number.
ORDINARY_USER = 61_000 + os.getpid() % 4_000

SECONDS = 120

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def state() -> dict[str, Any]:
    return {f"t{i}": torch.full((3000,), float(i)) for i in range(20)}


def in_a_child_with_threads(count: int, body: Callable[[], Any]) -> tuple[str, Any]:
    """What ``body`` has returned or raised in a forked child that may begin ``count`` threads."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setuid(ORDINARY_USER)
            limit = 1 + count
            resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))
            try:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    body()
                answer = ("ended", [str(warning.message) for warning in caught])
            except Exception as error:
                number = getattr(error, "errno", None)
                answer = ("failed", (number, "".join(traceback.format_exception(error))))
            os.write(write, pickle.dumps(answer))
        finally:
            os._exit(0)
    os.close(write)
    try:
        ready, _, _ = select.select([read], [], [], SECONDS)
        if not ready:
            return "hung", None
        with os.fdopen(os.dup(read), "rb") as pipe:
            answer = pickle.load(pipe)
        assert isinstance(answer, tuple)
        return answer
    finally:
        os.close(read)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A directory of that user's, and a checkpoint in it."""
    for parent in [tmp_path, *tmp_path.parents]:
        if parent.stat().st_mode & 0o005 != 0o005 and str(tmp_path).startswith("/tmp/"):
            parent.chmod(0o755)
    torch_ckpt.save(state(), tmp_path / "there", no_dist=True)
    os.chown(tmp_path, ORDINARY_USER, ORDINARY_USER)
    return tmp_path


def save(directory: Path) -> None:
    torch_ckpt.save(state(), directory / "new", no_dist=True)


def load(directory: Path) -> None:
    loaded = {name: torch.zeros_like(value) for name, value in state().items()}
    torch_ckpt.load(loaded, directory / "there", no_dist=True)
    assert all(torch.equal(loaded[name], value) for name, value in state().items())


def verify(directory: Path) -> None:
    assert torch_ckpt.verify(directory / "there").ok


def async_save(directory: Path) -> None:
    torch_ckpt.async_save(state(), directory / "async", no_dist=True).result()


@pytest.mark.parametrize("count", [0, 1, 2, 5, 30])
@pytest.mark.parametrize("work", [save, load, verify, async_save])
def test_with_few_threads_left_work_ends(
    work: Callable[[Path], None], count: int, shared: Path
) -> None:
    how, what = in_a_child_with_threads(count, lambda: work(shared))
    if work is async_save and how == "failed":
        # Python's own thread may be the one that is refused.
        assert what[0] == errno.EAGAIN or "can't start new thread" in what[1], what
    elif count == 0:
        assert how == "failed", what
        assert "ulimit -u" in what[1], what
    else:
        assert how == "ended", what
        told = [text for text in what if "ulimit -u" in text]
        # A save in the background has threads of two kinds.
        wanted = 32 if work is async_save else 16
        assert len(told) == (1 if count < wanted else 0), what
