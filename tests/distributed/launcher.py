"""Starts ranks, each in a process of its own, and tells what they said."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

REPOSITORY = Path(__file__).parents[2]

# All cases of a launch together; a hang fails them.
TIMEOUT_SECONDS = 240

# torchrun asks its ranks to end, and kills them after 30 seconds.
ENDING_SECONDS = 60

# Tests have more ranks than a machine may have GPUs.
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(REPOSITORY),
}


@dataclass(frozen=True)
class Launch:
    """What one start of torchrun does.

    Attributes:
        ranks: how many.
        cases: by name, in their order.
        before: the launch that must come before.
        skipped: by case that is not run: why.
    """

    ranks: int
    cases: Sequence[str]
    before: str | None = None
    skipped: Mapping[str, str] = field(default_factory=dict)


class Torchrun:
    """Runs each launch once, when a test first asks for one of its cases.

    Args:
        module: ends with a call of ``cases.main``.
        launches: by name.
        workdir: for all launches.
    """

    def __init__(self, module: str, launches: Mapping[str, Launch], workdir: Path) -> None:
        self.module = module
        self.launches = launches
        self.workdir = workdir
        self.outputs: dict[str, str] = {}
        self.codes: dict[str, int | None] = {}  # None where it hung

    def failures(self, launch: str, case: str) -> list[str]:
        """What each rank that failed a case says of it."""
        self.run(launch)
        failures = []
        for rank in range(self.launches[launch].ranks):
            outcome = self._outcomes(launch, rank).get(case)
            if outcome is None:
                failures.append(f"rank {rank} did not get to it:\n{self.outputs[launch]}")
            elif outcome["failure"]:
                failures.append(f"rank {rank}:\n{outcome['failure']}")
        return failures

    def run(self, launch: str) -> None:
        """Runs a launch, unless it has been."""
        if launch in self.outputs:
            return
        of = self.launches[launch]
        if of.before is not None:
            self.run(of.before)
        cases = [case for case in of.cases if case not in of.skipped]
        try:
            done = torchrun(
                of.ranks, "-m", self.module, self.workdir / launch, self.workdir, *cases
            )
        except TimeoutError as hang:
            self.outputs[launch] = str(hang)[-3000:]
            self.codes[launch] = None
        else:
            self.outputs[launch] = f"{done.stdout[-3000:]}\nexit code {done.returncode}"
            self.codes[launch] = done.returncode

    def _outcomes(self, launch: str, rank: int) -> dict[str, dict[str, str]]:
        log = Path(f"{self.workdir / launch}-{rank}.jsonl")
        lines = log.read_text().splitlines() if log.exists() else []
        return {outcome["case"]: outcome for outcome in map(json.loads, lines)}


def launch_tests(
    module: str, launches: Mapping[str, Launch], case_first: bool = False
) -> tuple[Any, Any, Any]:
    """What a file of launches names ``torchrun``, ``test_on_ranks`` and
    ``test_all_ranks_of_a_launch_end_well``: a fixture, and the tests that use it.

    Args:
        module: of the cases.
        launches: by name.
        case_first: in the ids of ``test_on_ranks``.
    """

    @pytest.fixture(scope="module", name="torchrun")
    def runner(tmp_path_factory: pytest.TempPathFactory) -> Torchrun:
        return Torchrun(module, launches, tmp_path_factory.mktemp(module.rpartition(".")[2]))

    # A test may be the first to ask for a launch and for all before it; one that hangs takes
    # longer than its time.
    longest = max(_length(launches, launch) for launch in launches)
    timeout = pytest.mark.timeout((longest + 1) * TIMEOUT_SECONDS)

    cases = [
        pytest.param(
            launch,
            case,
            id=f"{case}-{launch}" if case_first else f"{launch}-{case}",
            marks=pytest.mark.skipif(case in of.skipped, reason=of.skipped.get(case, "")),
        )
        for launch, of in launches.items()
        for case in of.cases
    ]

    @timeout
    @pytest.mark.parametrize(("launch", "case"), cases)
    def on_ranks(torchrun: Torchrun, launch: str, case: str) -> None:
        failures = torchrun.failures(launch, case)
        assert not failures, "\n".join(failures)

    @timeout
    @pytest.mark.parametrize("launch", launches)
    def end_well(torchrun: Torchrun, launch: str) -> None:
        """The interpreter's exit too, with the engine's threads in it."""
        of = launches[launch]
        if set(of.cases) <= set(of.skipped):
            pytest.skip("; ".join(sorted(set(of.skipped.values()))))
        torchrun.run(launch)
        assert torchrun.codes[launch] == 0, torchrun.outputs[launch]

    return runner, on_ranks, end_well


def _length(launches: Mapping[str, Launch], launch: str) -> int:
    """Of the chain of launches that ends with one."""
    before = launches[launch].before
    return 1 if before is None else 1 + _length(launches, before)


def torchrun(ranks: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a script, or "-m" and a module, with arguments of its own; its output is in stdout.

    Raises:
        TimeoutError: it has hung, and all its ranks have been ended; with the output.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), *map(str, arguments)]
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{_ended(process)}\nkilled after {TIMEOUT_SECONDS} s") from None
    return subprocess.CompletedProcess(command, process.returncode, output)


def _ended(agent: subprocess.Popen[str]) -> str:
    """Ends torchrun; its output. Ranks have sessions of their own: only torchrun can end them."""
    agent.terminate()
    try:
        return agent.communicate(timeout=ENDING_SECONDS)[0]
    except subprocess.TimeoutExpired:
        os.killpg(agent.pid, signal.SIGKILL)
        return agent.communicate()[0]


class Processes:
    """Ranks of which some may die. Not by torchrun, which then ends all of them: this process hosts
    their store as its agent does.

    Args:
        module: writes to RESULTS-{rank}.json, as an object, what each case returned.
        size: how many ranks.
        results: RESULTS, the module's first argument.
        arguments: the module's others.
        rank_0_hosts_store: instead, as where ranks are started by hand.
    """

    def __init__(
        self,
        module: str,
        size: int,
        results: Path,
        *arguments: str | Path,
        rank_0_hosts_store: bool = False,
    ) -> None:
        self.size = size
        self.outputs: list[str] = []
        self._command = [sys.executable, "-m", module, str(results), *map(str, arguments)]
        self._results = results
        if rank_0_hosts_store:
            with socket.create_server(("127.0.0.1", 0)) as server:
                self._port = server.getsockname()[1]
        else:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self._port = self._store.port
        self._agent = {} if rank_0_hosts_store else {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        self._processes = [self._start(rank) for rank in range(size)]

    def found(self, case: str, dead: int | None = None) -> list[Any]:
        """By rank what a case returned; None on the rank that may have died in it."""
        self.codes()
        logs = [Path(f"{self._results}-{rank}.json") for rank in range(self.size)]
        found = [json.loads(log.read_text()) if log.exists() else {} for log in logs]
        missing = [rank for rank, outcomes in enumerate(found) if case not in outcomes]
        assert missing in ([], [dead]), "\n".join(self.outputs)
        return [of_rank.get(case) for of_rank in found]

    def codes(self) -> list[int]:
        """Exit codes by rank, at the end."""
        if not self.outputs:
            self._wait()
        return [process.returncode for process in self._processes]

    def kill(self) -> None:
        """Ends what is left."""
        for process in self._processes:
            process.kill()
            process.wait()

    def _start(self, rank: int) -> subprocess.Popen[str]:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port)}
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.size)}
        return subprocess.Popen(
            self._command,
            cwd=REPOSITORY,
            env={**os.environ, **ENVIRONMENT, **address, **place, **self._agent},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _wait(self) -> None:
        for process in self._processes:
            try:
                self.outputs.append(process.communicate(timeout=TIMEOUT_SECONDS / 2)[0])
            except subprocess.TimeoutExpired:
                process.kill()
                self.outputs.append(f"{process.communicate()[0]}\nkilled by the test")
