"""Several ranks: each case of cases.py on two and on four, a launch of torchrun for each number."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.cases import CASES, LOADS_OTHERS, SLOW

REPOSITORY = Path(__file__).parents[2]

# All cases of a launch together; a hang fails them.
TIMEOUT_SECONDS = 240

#: Launches by name: ranks, cases, and the launch that must come before.
LAUNCHES: dict[str, tuple[int, list[str], str | None]] = {
    "2 ranks": (2, [name for name in CASES if name != LOADS_OTHERS], None),
    "4 ranks": (4, [name for name in CASES if name not in SLOW], "2 ranks"),
    "2 ranks again": (2, [LOADS_OTHERS], "4 ranks"),
}


class Launcher:
    """Runs each launch once, when a test first asks for one of its cases."""

    def __init__(self, workdir: Path) -> None:
        self.workdir = workdir
        self.outputs: dict[str, str] = {}
        self.codes: dict[str, int] = {}

    def failures(self, launch: str, case: str) -> list[str]:
        """What each rank that failed a case says of it."""
        if launch not in self.outputs:
            self._run(launch)
        ranks = LAUNCHES[launch][0]
        failures = []
        for rank in range(ranks):
            outcome = self._outcomes(launch, rank).get(case)
            if outcome is None:
                failures.append(f"rank {rank} did not get to it:\n{self.outputs[launch]}")
            elif outcome["failure"]:
                failures.append(f"rank {rank}:\n{outcome['failure']}")
        return failures

    def _outcomes(self, launch: str, rank: int) -> dict[str, dict[str, str]]:
        log = Path(f"{self.workdir / launch}-{rank}.jsonl")
        lines = log.read_text().splitlines() if log.exists() else []
        return {outcome["case"]: outcome for outcome in map(json.loads, lines)}

    def _run(self, launch: str) -> None:
        ranks, cases, before = LAUNCHES[launch]
        if before is not None and before not in self.outputs:
            self._run(before)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), "-m", "tests.distributed.cases"]
        command += [str(self.workdir), str(self.workdir / launch), *cases]
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            output += f"\nkilled after {TIMEOUT_SECONDS} s"
        self.outputs[launch] = f"{output[-3000:]}\nexit code {process.returncode}"
        self.codes[launch] = process.returncode


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    return Launcher(tmp_path_factory.mktemp("ranks"))


@pytest.mark.timeout(3 * TIMEOUT_SECONDS)
@pytest.mark.parametrize(
    ("launch", "case"),
    [
        pytest.param(launch, case, id=f"{case}-{launch}")
        for launch, (_ranks, cases, _before) in LAUNCHES.items()
        for case in cases
    ],
)
def test_on_ranks(launcher: Launcher, launch: str, case: str) -> None:
    failures = launcher.failures(launch, case)
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_all_ranks_of_a_launch_end_well(launcher: Launcher, launch: str) -> None:
    """The interpreter's exit too, with the engine's threads in it."""
    launcher.failures(launch, LAUNCHES[launch][1][0])
    assert launcher.codes[launch] == 0, launcher.outputs[launch]
