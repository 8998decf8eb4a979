"""Random schedules of jobs on two hosts that use one root: kills, freezes and takeovers.

A model knows the saves that were reported, and the saves in which a job died, froze or failed. A
restore must return the newest reported save, or an unreported save after it.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import Cluster
from tests.sweeps import SEED, TORTURE

pytestmark = [pytest.mark.full, pytest.mark.alone, pytest.mark.timeout(900)]

# The schedules of a test; few, so that pytest -k can run the tests that an interrupted run lacks.
SCHEDULES = 100
TESTS = 10 if TORTURE else 1
COMMANDS = 12

# More system calls than most saves make.
MOST_POINTS = 100

Reply = dict[str, Any]


@dataclass
class Save:
    """A save of a job.

    Attributes:
        job: number of the job, in the order in which jobs took the lease.
        is_reported: False if the job died, froze or failed, so that the save may exist or not.
    """

    job: int
    step: int
    value: float
    is_reported: bool


@dataclass
class Model:
    """The reports of all jobs.

    Attributes:
        jobs: number of jobs that have taken the lease.
        saves: all saves, in the order of the jobs.
        running: number of the running job of each host.
        frozen: the save in which the job of a host is stopped.
    """

    jobs: int = 0
    saves: list[Save] = field(default_factory=list)
    running: dict[int, int] = field(default_factory=dict)
    frozen: dict[int, Save] = field(default_factory=dict)

    def starts(self, host: int, reply: Reply) -> None:
        """A job has started on a host, and has restored."""
        step, values = reply["restored"], reply["values"]
        assert len(values) == 1, f"a mixture of saves was restored: {reply}"
        found = [save for save in self.saves if (save.step, save.value) == (step, values[0])]
        reported = [number for number, save in enumerate(self.saves) if save.is_reported]
        if not found:
            assert step == 0, f"a save was restored that no job has made: {reply}"
            assert not reported, f"no save was restored, but {self.saves[reported[-1]]} exists"
        else:
            [save] = found
            assert not reported or self.saves.index(save) >= reported[-1], (
                f"{save} was restored, but {self.saves[reported[-1]]} is newer"
            )
            save.is_reported = True
        self.jobs += 1
        self.running[host] = self.jobs

    def saves_step(self, host: int, step: int, value: float) -> Save:
        """The job of a host has tried to save."""
        save = Save(self.running[host], step, value, is_reported=False)
        self.saves.append(save)
        self.saves.sort(key=lambda each: each.job)
        return save

    def reports(self, save: Save) -> None:
        """A job has reported a save as done."""
        assert save.is_reported or save.job == self.jobs, (
            f"{save} was reported after job {self.jobs} had taken the lease and restored"
        )
        save.is_reported = True

    def ends(self, host: int) -> None:
        self.running.pop(host, None)
        self.frozen.pop(host, None)


class Driver:
    """Sends commands to the hosts of a schedule, and compares the replies with the model."""

    def __init__(self, hosts: list[subprocess.Popen[str]], root: Path, seed: int) -> None:
        self._hosts = hosts
        self._root = str(root)
        self._random = random.Random(seed)
        self._steps: dict[int, int] = {}
        self._value = 0.0
        self.model = Model()
        self.log: list[str] = []
        self.seen: Counter[str] = Counter()  # replies

    def perform(self) -> None:
        """Performs one random command on one host."""
        model, host = self.model, self._random.randrange(len(self._hosts))
        if host in model.frozen:
            if self._random.random() < 0.5:
                self._thaw(host)
            else:
                self._kill(host)
        elif host not in model.running:
            self._start(host, takeover=self._random.random() < 0.4)
        else:
            choices = [self._save, self._save_and_die, self._save_and_freeze, self._end, self._kill]
            self._random.choices(choices, [4, 2, 3, 1, 1])[0](host)

    def finish(self) -> None:
        """Starts a last job, while frozen jobs are still frozen. Then ends all jobs."""
        for host in range(len(self._hosts)):
            if host in self.model.frozen:
                continue
            if host in self.model.running:
                self._end(host)
            self._start(host, takeover=True)
            if host in self.model.running:
                self._save(host)
        for host in list(self.model.frozen):
            self._thaw(host)
        for host in list(self.model.running):
            self._end(host)

    def _ask(self, host: int, **command: Any) -> Reply:
        process = self._hosts[host]
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps(command), file=process.stdin, flush=True)
        reply: Reply = json.loads(process.stdout.readline())
        self.log.append(f"host {host}: {command} -> {reply}")
        self.seen.update(reply.keys())
        return reply

    def _start(self, host: int, takeover: bool) -> None:
        others = self.model.running.keys() - self.model.frozen.keys()
        reply = self._ask(host, do="start", root=self._root, takeover=takeover)
        if "refused" in reply:
            assert self.model.running, "a job was refused although no other job runs"
            assert not takeover or self.model.frozen, "a takeover was refused"
            assert "another" in reply["refused"], reply
            return
        held = {other for other in others if self.model.running[other] == self.model.jobs}
        assert takeover or not held, f"the job took the lease of the job on host {held}"
        self.model.starts(host, reply)
        self._steps[host] = reply["restored"]

    def _try_save(self, host: int, **faults: int) -> None:
        self._value += 1
        reply = self._ask(host, do="save", value=self._value, **faults)
        save = self.model.saves_step(host, self._steps[host] + 1, self._value)
        if "frozen" in reply:
            self.model.frozen[host] = save
        else:
            self._end_save(host, save, reply)

    def _end_save(self, host: int, save: Save, reply: Reply) -> None:
        if "died" in reply:
            self.model.ends(host)
        elif "saved" in reply:
            assert reply["saved"] == save.step
            self._steps[host] = save.step
            self.model.reports(save)
        else:
            assert self.model.running[host] < self.model.jobs, f"a save failed: {reply}"
            assert "taken over" in reply["error"], reply

    def _save(self, host: int) -> None:
        self._try_save(host)

    def _save_and_die(self, host: int) -> None:
        self._try_save(host, die=self._random.randrange(1, MOST_POINTS))

    def _save_and_freeze(self, host: int) -> None:
        self._try_save(host, freeze=self._random.randrange(1, MOST_POINTS))

    def _thaw(self, host: int) -> None:
        save = self.model.frozen.pop(host)
        self._end_save(host, save, self._ask(host, do="thaw"))

    def _kill(self, host: int) -> None:
        self._ask(host, do="kill")
        self.model.ends(host)

    def _end(self, host: int) -> None:
        reply = self._ask(host, do="end")
        assert "ended" in reply, reply
        self.model.ends(host)


@pytest.mark.parametrize("first", range(0, TESTS * SCHEDULES, SCHEDULES))
@pytest.mark.parametrize("hosts", ["juicefs", "one disk"], indirect=True)
def test_no_schedule_of_two_hosts_loses_or_mixes_a_save(hosts: Cluster, first: int) -> None:
    command = [sys.executable, "-m", "tests.cluster.jobs"]
    started = [host.start(command, {}) for host in hosts.hosts]
    seen: Counter[str] = Counter()
    for number in range(first, first + SCHEDULES):
        seed = 1000 * SEED + number
        driver = Driver(started, hosts.path / f"run{number}", seed)
        try:
            for _ in range(COMMANDS):
                driver.perform()
            driver.finish()
        except AssertionError as error:
            log = "\n".join(driver.log)
            raise AssertionError(f"schedule with seed {seed}: {error}\n{log}") from error
        seen.update(driver.seen)
    # Otherwise, the schedules would test little.
    assert min(seen[reply] for reply in ("restored", "refused", "saved", "died", "frozen", "error"))
