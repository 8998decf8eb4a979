"""The loop of docs/integrations.md with the real Accelerate, interrupted and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ckpt
from tests.layers import REPOSITORY
from tests.snippets import snippets_of
from tests.support import assert_equal

pytestmark = pytest.mark.full

accelerate = pytest.importorskip("accelerate")

[SNIPPET] = [
    found.code
    for found in snippets_of(REPOSITORY / "docs" / "integrations.md")
    if "from accelerate import" in found.code
]


def trained(seed: int, steps: int = 40) -> dict[str, Any]:
    """Runs the loop in the working directory; returns its names."""
    assert "40)" in SNIPPET
    torch.manual_seed(seed)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(SNIPPET.replace("40)", f"{steps})"), "integrations.md", "exec"), namespace)
    return namespace


def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = []
    for name, parts in (("whole", [40]), ("parts", [20, 40])):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        for number, steps in enumerate(parts):
            # The second part restores the weights and the random state of the first part.
            end = trained(number, steps)
        ends.append(end)
    uninterrupted, resumed = ends
    assert resumed["step"] == 39
    for key in ("model", "optimizer", "scheduler"):
        assert_equal(resumed[key].state_dict(), uninterrupted[key].state_dict())


def test_a_plain_model_reads_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    prepared = trained(0)["model"]
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Dropout(), torch.nn.Linear(32, 1))
    torch_ckpt.load({"model": model}, tmp_path / "checkpoints", no_dist=True)
    assert_equal(dict(model.state_dict()), dict(prepared.state_dict()))
