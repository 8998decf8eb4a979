"""The launcher: the environment of ranks, and ranks that die or hang. Also their program:

    python -m tests.distributed.test_launcher PATH (hang|environment|fail)

``hang`` writes its process id to PATH, a pipe, and does not end. ``environment`` writes the
variables to PATH-{rank}.json. ``fail`` hangs on all ranks but the last, which fails when the others
hang.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.cases import Launch
from tests.distributed.launcher import Group
from tests.ranks import TIMEOUT_SECONDS, by_fork, torchrun

pytestmark = pytest.mark.full

RANKS = 2
MODULE = "tests.distributed.test_launcher"


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Expires the time limit when all ranks have written to ``pipe``. Yields their process ids."""
    os.mkfifo(tmp_path / "pipe")
    # Opened for writing, too, so that there is no end of file between two ranks.
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


def test_hanging_ranks_are_ended_and_their_output_is_shown(
    tmp_path: Path, hanging: list[int]
) -> None:
    with pytest.raises(TimeoutError, match="said before the hang") as hang:
        torchrun(RANKS, "-m", MODULE, tmp_path / "pipe", "hang")
    assert f"killed after {TIMEOUT_SECONDS} s" in str(hang.value)
    assert len(hanging) == RANKS
    assert not alive(hanging)


# --- cases --------------------------------------------------------------------------------------


def case_passes(launch: Launch) -> None:
    """Writes its process ids to files."""
    path = launch.path(str(launch.rank))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(str(os.getpid()))
    dist.barrier()


def case_all_fail(launch: Launch) -> None:
    raise AssertionError(f"on purpose on {launch.rank}")


def case_one_fails(launch: Launch) -> None:
    print(f"{launch.rank} has begun")
    dist.barrier()
    assert launch.rank == 0, "on purpose"
    signal.pause()


def case_one_dies(launch: Launch) -> None:
    print(f"{launch.rank} has begun")
    dist.barrier()
    if launch.rank == 1:
        os._exit(7)
    signal.pause()


def case_one_hangs(launch: Launch) -> None:
    print(f"{launch.rank} has begun")
    dist.barrier()
    if launch.rank == 1:
        signal.pause()


def case_one_exits_with_code_3(launch: Launch) -> None:
    if launch.rank == 1:
        atexit.register(os._exit, 3)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    made = Group(MODULE, RANKS, tmp_path, case_seconds=5, grace_seconds=1)
    yield made
    made.request_end()
    made.end()


def pids(group: Group) -> list[int]:
    """Runs a passing case, and returns the process ids of the ranks."""
    group.run("passes")
    path = group.workdir / f"{RANKS}-ranks" / "passes"
    return [int((path / str(rank)).read_text()) for rank in range(RANKS)]


def test_the_ranks_of_a_group_are_reused_for_the_next_case(group: Group) -> None:
    before = pids(group)
    with pytest.raises(AssertionError, match=r"rank 0: (?s:.*)on purpose on 0(?s:.*)rank 1: "):
        group.run("all_fail")
    assert pids(group) == before


@pytest.mark.parametrize(
    ("case", "texts"),
    [
        ("one_fails", ["rank 0: hangs after others have failed", "AssertionError: on purpose"]),
        ("one_dies", ["rank 0: hangs after others have failed", "rank 1: ended with code 7"]),
        ("one_hangs", ["rank 1: hangs after 5 s, and is killed", "in case_one_hangs"]),
    ],
)
def test_a_case_in_which_ranks_lose_step_fails_with_the_output_of_all_ranks(
    group: Group, case: str, texts: list[str]
) -> None:
    before = pids(group)
    with pytest.raises(AssertionError) as failure:
        group.run(case)
    for text in (*texts, "0 has begun", "1 has begun"):
        assert text in str(failure.value)
    assert not alive(before)
    assert not set(pids(group)) & set(before)


def test_ranks_that_do_not_end_normally_are_reported(tmp_path: Path) -> None:
    group = Group(MODULE, RANKS, tmp_path)
    group.run("one_exits_with_code_3")
    group.request_end()
    with pytest.raises(AssertionError, match=r"exit codes \[0, 3\]"):
        group.end()


def test_a_program_that_fails_on_one_forked_rank_is_ended_on_the_others(tmp_path: Path) -> None:
    done = by_fork(RANKS, "-m", MODULE, tmp_path, "fail")
    assert done.returncode == 1
    assert done.stdout.count("said before the hang") == RANKS
    assert "AssertionError: on purpose" in done.stdout


#: Variables that torchrun sets and forked ranks lack: the error file, and settings of CUDA.
NOT_TOLD = {
    *("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"),
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"),
}

#: Variables that differ between two runs.
OF_A_RUN = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}


def test_forked_ranks_have_the_environment_of_torchrun_and_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    environments = []
    for name, launch in (("torchrun", torchrun), ("fork", by_fork)):
        done = launch(RANKS, "-m", MODULE, tmp_path / name, "environment")
        assert done.returncode == 0, done.stdout
        files = [tmp_path / f"{name}-{rank}.json" for rank in range(RANKS)]
        environments.append([json.loads(file.read_text()) for file in files])
    for by_torchrun, forked in zip(*environments, strict=True):
        assert forked.keys() >= OF_A_RUN
        for name in NOT_TOLD:
            by_torchrun.pop(name, None)
        for name in OF_A_RUN:
            del by_torchrun[name], forked[name]
        assert forked == by_torchrun
        assert forked["CUDA_VISIBLE_DEVICES"] == ""


def main() -> None:
    path, what = sys.argv[1:]
    if what == "environment":
        Path(f"{path}-{os.environ['RANK']}.json").write_text(json.dumps(dict(os.environ)))
        return
    print("said before the hang", flush=True)
    if what == "fail":
        dist.init_process_group("gloo")
        dist.barrier()
        assert dist.get_rank() < dist.get_world_size() - 1, "on purpose"
    else:
        with open(path, "w") as pipe:
            pipe.write(f"{os.getpid()}\n")
    signal.pause()


if __name__ == "__main__":
    main()
