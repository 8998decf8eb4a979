"""The recipes in examples/: each is killed, resumes, and ends like an uninterrupted run."""

from __future__ import annotations

import dataclasses
import os
import re
import runpy
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import torch_ckpt
from tests.forked import ENVIRONMENT, REPOSITORY
from tests.ranks import TIMEOUT_SECONDS, by_fork, free_port, ranks, run_program, torchrun
from torch_ckpt.inspection.diff import diff
from torch_ckpt.steps.root_lease import LEASE_NAME

pytestmark = pytest.mark.full

STEPS = 10
SAVE_EVERY = 3
# The save of step 6 may be running; the save of step 3 has ended.
KILL_AT = 8
RESUMES_AT = (3, 6)

# Tolerance for runs that add numbers in another order, after so few steps.
CLOSE = {"atol": 1e-6, "rtol": 1e-3}


class Recipe:
    """An example.

    Args:
        launch: torchrun, or a function that starts ranks likewise.
    """

    def __init__(
        self, script: str, folder: Path, *options: str, launch: Callable[..., Any] = by_fork
    ) -> None:
        self._launch = launch
        self.script = str(REPOSITORY / "examples" / script)
        self.folder = folder
        is_titan = script == "titan_loop.py"
        self.options = ["--steps", str(STEPS)]
        if is_titan:
            self.options += ["--checkpoint.folder", str(folder)]
            self.options += ["--checkpoint.interval", str(SAVE_EVERY)]
        else:
            self.options += ["--checkpoints", str(folder), "--save-every", str(SAVE_EVERY)]
        self.options += options

    def run(self, ranks: int, *options: str, kill: bool = False) -> int:
        """Runs until the end, or until a rank is killed. Returns the first step."""
        interrupted = "-m", "tests.distributed.interrupted", "SIGKILL", str(ranks - 1), str(KILL_AT)
        command = [*(interrupted if kill else ()), self.script, *self.options, *options]
        done = self._launch(ranks, *command)
        assert (done.returncode != 0) is kill, done.stdout
        if not kill:
            assert re.search(r"^step +\d+ +loss \d", done.stdout, re.M), done.stdout
            assert re.search(r"^step \d+ is saved: ", done.stdout, re.M), done.stdout
        return started_at(done.stdout)

    @property
    def last(self) -> Path:
        """Returns the checkpoint at the end."""
        return self.folder / f"{STEPS - STEPS % SAVE_EVERY:010d}"


def assert_equal(a: Path, b: Path, **tolerance: float) -> None:
    report = diff(a, b, **tolerance)
    # The state of Python's random numbers is neither seeded nor used by a run.
    objects = [name for name in report.objects if not name.startswith("rng.")]
    report = dataclasses.replace(report, objects=objects)
    assert report.equal, "\n".join(report.lines())


def started_at(output: str) -> int:
    found = re.search(r"starts at step (\d+)", output)
    assert found is not None, output
    return int(found[1])


PREEMPTED = ("--save-every", "30", "--steps", "30")
OVERLAPPED = ("--checkpoint.async_mode", "overlapped")


@pytest.mark.timeout(4 * TIMEOUT_SECONDS)
@pytest.mark.parametrize(
    ("script", "launch", "killed_on", "resumed_on", "tolerance"),
    [
        # A recipe as a user starts it.
        pytest.param("ddp.py", torchrun, (2,), (2,), {}, id="ddp"),
        pytest.param(
            "titan_loop.py", by_fork, (2, *OVERLAPPED), (2, *OVERLAPPED), {}, id="titan_loop"
        ),
        pytest.param("fsdp2.py", by_fork, (4,), (2,), CLOSE, id="four ranks, then two"),
        pytest.param(
            "tensor_parallel.py",
            by_fork,
            (2, "--tensor", "2"),
            (2, "--tensor", "1"),
            CLOSE,
            id="another layout",
        ),
    ],
)
def test_a_killed_run_resumes_and_ends_like_an_uninterrupted_one(
    tmp_path: Path,
    script: str,
    launch: Callable[..., Any],
    killed_on: Any,
    resumed_on: Any,
    tolerance: dict[str, float],
) -> None:
    uninterrupted = Recipe(script, tmp_path / "whole", launch=launch)
    killed = Recipe(script, tmp_path / "killed")
    assert uninterrupted.run(*resumed_on) == 0
    assert killed.run(*killed_on, kill=True) == 0
    assert killed.run(*resumed_on) in RESUMES_AT
    assert_equal(uninterrupted.last, killed.last, **tolerance)


@pytest.mark.timeout(4 * TIMEOUT_SECONDS)
def test_a_notice_to_one_rank_makes_all_save_one_step_and_request_a_restart(tmp_path: Path) -> None:
    uninterrupted = Recipe("preemption.py", tmp_path / "whole", *PREEMPTED)
    assert uninterrupted.run(2) == 0
    preempted = Recipe("preemption.py", tmp_path / "preempted", *PREEMPTED)
    program = ["-m", "tests.distributed.interrupted", "SIGTERM", "1", "7", preempted.script]
    # torchrun has one exit code for all of them.
    with ranks(2, run_program, [*program, *preempted.options]) as group:
        assert group.codes(TIMEOUT_SECONDS) == [75, 75], group.said()
        output = group.children[0].said()
    stopped = re.search(r"stopped after step (\d+)", output)
    assert stopped is not None, output
    names = {path.name for path in preempted.folder.iterdir()} - {LEASE_NAME}
    assert names == {f"{int(stopped[1]):010d}"}
    assert preempted.run(2) == int(stopped[1])
    assert_equal(uninterrupted.folder / f"{30:010d}", preempted.folder / f"{30:010d}")


@pytest.mark.timeout(4 * TIMEOUT_SECONDS)
def test_peft_reads_the_adapters_of_a_run_that_was_resumed(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    exported = tmp_path / "adapters"
    recipe = Recipe("lora.py", tmp_path / "run", "--export", str(exported))
    assert recipe.run(2, "--steps", "6") == 0
    assert recipe.run(1) == 6
    assert sorted(path.name for path in exported.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    made = runpy.run_path(recipe.script)
    read = peft.PeftModel.from_pretrained(made["base_model"](), exported)
    # PEFT ignores unknown names, and keeps the initial values of missing names.
    config = peft.LoraConfig.from_pretrained(exported)
    trained = peft.get_peft_model(made["base_model"](), config)
    torch_ckpt.load({"adapters": made["Adapters"](trained)}, recipe.folder / f"{STEPS}")
    found, expected = read.state_dict(), trained.state_dict()
    assert found.keys() == expected.keys()
    assert any(name.endswith("lora_B.default.weight") for name in found)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        assert not name.endswith("lora_B.default.weight") or value.count_nonzero() > 0
    read.save_pretrained(tmp_path / "by PEFT")
    of_peft = load_file(tmp_path / "by PEFT" / "adapter_model.safetensors")
    ours = load_file(exported / "adapter_model.safetensors")
    assert ours.keys() == of_peft.keys()


SRUN = """#!/bin/bash
for rank in $(seq 0 $((SLURM_NTASKS - 1))); do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" &
    tasks+=($!)
done
highest=0
for task in "${tasks[@]}"; do
    wait "$task" || { code=$?; ((code > highest)) && highest=$code; }
done
exit $highest
"""

SCONTROL = """#!/bin/bash
if [ "$1" = requeue ]; then echo "$2" > "$REQUEUED"; else printf '127.0.0.1\\nanother\\n'; fi
"""


def batch_script(file: Path) -> str:
    """Returns the script behind the line for sbatch, up to an empty line or the end of the
    block."""
    found = re.search(r"#SBATCH [^\n]*\n(.*?)\n *(?:```|\n)", file.read_text(), re.S)
    assert found is not None
    return textwrap.dedent(found[1])


@pytest.mark.timeout(TIMEOUT_SECONDS)
def test_the_batch_script_starts_all_ranks_and_requests_a_restart_from_slurm(
    tmp_path: Path,
) -> None:
    script = batch_script(REPOSITORY / "docs" / "recipes.md")
    assert batch_script(REPOSITORY / "examples" / "preemption.py") == script
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    preempted = Recipe("preemption.py", tmp_path / "preempted", *PREEMPTED)
    command = "-m tests.distributed.interrupted SIGTERM 1 7"
    command = " ".join([sys.executable, command, preempted.script, *preempted.options])
    for shown, run in (("29500", str(free_port())), ("python examples/preemption.py", command)):
        assert script.count(shown) == 1
        script = script.replace(shown, run)
    slurm = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "4711", "REQUEUED": str(tmp_path / "requeued")}
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=REPOSITORY,
        env={**os.environ, **ENVIRONMENT, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert "stopped after step" in done.stdout, done.stdout
    assert (tmp_path / "requeued").read_text() == "4711\n"


@pytest.mark.timeout(TIMEOUT_SECONDS)
@pytest.mark.parametrize(
    ("script", "ranks", "options", "code", "text"),
    [
        (
            "titan_loop.py",
            1,
            ["--checkpoint.async_mode", "async_with_pinned_mem"],
            2,
            "choose from",
        ),
        ("tensor_parallel.py", 2, ["--tensor", "3"], 1, "2 ranks cannot be split into groups of 3"),
    ],
    ids=["an unknown way to save", "ranks that make no complete groups"],
)
def test_invalid_options_are_refused(
    tmp_path: Path, script: str, ranks: int, options: list[str], code: int, text: str
) -> None:
    recipe = Recipe(script, tmp_path, *options)
    done = by_fork(ranks, recipe.script, *recipe.options)
    assert done.returncode == code, done.stdout
    assert text in done.stdout
