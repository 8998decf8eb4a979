"""Trainers of transformers and Lightning on two ranks with DDP: interrupted and resumed."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path

import pytest
import torch

import torch_ckpt
from tests.metadata import read_metadata
from tests.ranks import TIMEOUT_SECONDS, by_fork
from tests.support import data_files
from torch_ckpt.checkpoint.metadata import checksum_tables

pytestmark = pytest.mark.full

RANKS = 2
STEP = 6


# Importing what a Trainer needs takes longer than its training.
run_forked = partial(by_fork, modules=["transformers.trainer", "lightning.pytorch"])


def run(which: str, folder: Path, weights: Path, end_before: int = 0) -> None:
    program = ("-m", "tests.distributed.trainer_cases", which, folder, weights, str(end_before))
    done = run_forked(RANKS, *program)
    assert (done.returncode != 0) is (end_before > 0), done.stdout


@pytest.mark.timeout(4 * TIMEOUT_SECONDS)
@pytest.mark.parametrize("which", ["transformers", "lightning", "model_parallel"])
def test_an_interrupted_run_resumes_and_ends_like_an_uninterrupted_one(
    tmp_path: Path, which: str
) -> None:
    package = "lightning" if which == "model_parallel" else which
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"no {package}")
    run(which, tmp_path / "whole", tmp_path / "weights")
    run(which, tmp_path / "parts", tmp_path / "none", end_before=STEP)
    assert not list(tmp_path.glob("none-*"))
    run(which, tmp_path / "parts", tmp_path / "resumed")
    for rank in range(RANKS):
        uninterrupted = torch.load(tmp_path / f"weights-{rank}.pt")
        resumed = torch.load(tmp_path / f"resumed-{rank}.pt")
        for name, value in uninterrupted.items():
            assert torch.equal(resumed[name], value), f"rank {rank}: {name}"
    if which == "model_parallel":
        report = torch_ckpt.verify(tmp_path / "parts/last.ckpt")
        # Lightning writes meta.pt.
        assert (report.ok, report.unreferenced) == (True, ["meta.pt"])
        files = data_files(tmp_path / "parts/last.ckpt")
        assert [file.name[:4] for file in files] == ["__0_", "__1_"]
        # Stock torch writes none.
        assert checksum_tables(read_metadata(tmp_path / "parts/last.ckpt")).keys() == {
            file.name for file in files
        }


@pytest.mark.timeout(2 * TIMEOUT_SECONDS)
def test_a_last_step_that_one_rank_could_not_save_is_saved_again_by_all(tmp_path: Path) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("no transformers")
    run("failing", tmp_path, tmp_path / "weights")
    with torch_ckpt.CheckpointManager(tmp_path / "checkpoints", read_only=True) as manager:
        assert manager.all_steps() == [2]
