"""The launcher itself: what ranks are told, and what becomes of ranks that hang."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launcher import TIMEOUT_SECONDS, Launch, Processes, Torchrun, torchrun

RANKS = 2
MODULE = "tests.distributed.launched"


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Time is up when all ranks have written to ``pipe``; their process ids."""
    os.mkfifo(tmp_path / "pipe")
    # For writing too: it then has no end between two ranks.
    pipe = os.open(tmp_path / "pipe", os.O_RDWR)
    communicate = subprocess.Popen.communicate
    ids: list[int] = []

    def hasten(self: Any, *arguments: Any, timeout: float | None = None) -> Any:
        if timeout != TIMEOUT_SECONDS:
            return communicate(self, *arguments, timeout=timeout)
        written = b""
        while written.count(b"\n") < RANKS:
            written += os.read(pipe, 1024)
        ids.extend(map(int, written.split()))
        raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", hasten)
    yield ids
    os.close(pipe)


def alive(processes: list[int]) -> list[int]:
    return [process for process in processes if Path(f"/proc/{process}").exists()]


def test_ranks_that_hang_are_ended_and_what_they_said_is_shown(
    tmp_path: Path, hanging: list[int]
) -> None:
    with pytest.raises(TimeoutError, match="said before the hang") as hang:
        torchrun(RANKS, "-m", MODULE, tmp_path / "pipe", "hang")
    assert f"killed after {TIMEOUT_SECONDS} s" in str(hang.value)
    assert len(hanging) == RANKS
    assert not alive(hanging)


def test_a_launch_that_hangs_fails_its_cases_with_what_was_said(
    tmp_path: Path, hanging: list[int]
) -> None:
    launches = Torchrun(MODULE, {"pipe": Launch(RANKS, ["hang"])}, tmp_path)
    failures = launches.failures("pipe", "hang")
    assert len(failures) == RANKS
    for failure in failures:
        assert "said before the hang" in failure
    assert launches.codes["pipe"] != 0
    assert not alive(hanging)


@pytest.mark.parametrize("by", ["torchrun", "hand"])
def test_ranks_see_no_gpu_and_know_their_number_on_the_machine(
    tmp_path: Path, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    if by == "torchrun":
        done = torchrun(RANKS, "-m", MODULE, tmp_path / "told", "tell")
        assert done.returncode == 0, done.stdout
    else:
        ranks = Processes(MODULE, RANKS, tmp_path / "told", "tell")
        assert ranks.codes() == [0] * RANKS, "\n".join(ranks.outputs)
    for rank in range(RANKS):
        told = json.loads((tmp_path / f"told-{rank}.json").read_text())["environment"]
        assert told == {"RANK": str(rank), "LOCAL_RANK": str(rank), "CUDA_VISIBLE_DEVICES": ""}
