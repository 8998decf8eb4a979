"""``--json``: each command prints one document of the shape that docs/cli.md describes."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands import Run
from tests.support import data_files, save, save_step
from torch_ckpt.cli.arguments import build_parser, subcommands
from torch_ckpt.cli.output import print_json
from torch_ckpt.inspection.diff_report import DiffReport, TensorDifference
from torch_ckpt.inspection.verify import Damage, VerifyReport
from torch_ckpt.steps import LocalSteps

DOCUMENT = Path(__file__).parents[3] / "docs" / "cli.md"

#: Keys whose values are dicts with keys of the user's choice or of the options of a class.
OPEN = {"metrics", "notes", "facts", "measured", "options", "value"}


def documented() -> dict[str, str]:
    """Returns the documented shape of each command's document."""
    (block,) = re.findall(r"```text\n(ls .*?)```", DOCUMENT.read_text(), re.S)
    shapes = {}
    for entry in re.split(r"\n(?=\w)", block.strip()):
        commands, _, shape = entry.partition("{")
        for command in commands.split(", "):
            shapes[command.strip()] = " ".join(f"{{{shape}".split())
    return shapes


def shape_of(value: Any, key: str = "") -> str:
    """Describes a document by the keys of its dicts."""
    if isinstance(value, dict) and key not in OPEN:
        parts = []
        for name, item in value.items():
            shape = shape_of(item, name)
            parts.append(f"{name}: {shape}" if shape else name)
        return f"{{{', '.join(parts)}}}"
    if isinstance(value, list):
        shapes = dict.fromkeys(filter(None, map(shape_of, value)))
        return f"[{' | '.join(shapes)}]" if shapes else ""
    return ""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Root of a run with steps 1 to 3."""
    root = tmp_path / "run"
    for step in (1, 2, 3):
        marker = {"saved_at": time.time(), "metrics": {"loss": 1.0}}
        state = {"model.weight": torch.ones(5), "model.bias": torch.ones(1), "epoch": step}
        save_step(LocalSteps(root), step, state, marker=lambda m=marker: m)
    return root


@pytest.mark.parametrize(
    "command",
    [
        *("ls ROOT/2", "convert ROOT/2 ROOT/model.pt", "steps ROOT"),
        *("gc ROOT --keep-last 1", "delete ROOT 1", "pin ROOT 1", "unpin ROOT 1"),
        "doctor ROOT --size 1MiB",
    ],
)
def test_a_command_prints_the_documented_shape(root: Path, run: Run, command: str) -> None:
    name, *arguments = command.replace("ROOT", str(root)).split()
    document = run.json(name, *arguments, code=None)
    # doctor's outcome depends on the file system of the tests.
    assert run.code == (0 if document.get("ok", True) else 1)
    shape = shape_of(document)
    if name == "delete":  # shares its shape with gc; no rule keeps a step
        shape = shape.replace("kept", "kept: [{step, reasons}]")
    assert shape == documented()[name]


def test_doctor_of_a_url_prints_the_documented_shape(tmp_path: Path, run: Run) -> None:
    pytest.importorskip("fsspec")
    document = run.json("doctor", f"memory://{tmp_path}", "--size", "64KiB")
    assert shape_of(document) == documented()["doctor"]


def test_show_prints_the_documented_shape(tmp_path: Path, run: Run) -> None:
    save({"a": torch.ones(5), "b": 3}, tmp_path / "sound", thread_count=1)
    save({"a": torch.ones(5)}, tmp_path / "damaged", thread_count=1)
    data_files(tmp_path / "damaged")[0].unlink()
    document = run.json("show", tmp_path / "sound")
    document["damaged"] = run.json("show", tmp_path / "damaged", code=1)["damaged"]
    assert shape_of(document) == documented()["show"]


def test_verify_prints_the_documented_shape() -> None:
    damage = Damage("name", "file", 0, 1, "what")
    report = VerifyReport(
        "checkpoint",
        damaged=[damage],
        missing=[("file", ["name"])],
        incomplete=[("name", "what")],
        unread=[damage],
    )
    assert shape_of(report.document()) == documented()["verify"]


def test_diff_prints_the_documented_shape() -> None:
    report = DiffReport(
        "a",
        "b",
        kinds=[("name", "tensor", "object")],
        shapes=[("name", (1,), (2,))],
        dtypes=[("name", "float32", "float64")],
        tensors=[TensorDifference("name", (1,), 1, 1, 1, 1.0, 1.0, (0,))],
    )
    assert shape_of(report.document()) == documented()["diff"]


def test_every_command_that_prints_facts_is_documented() -> None:
    with_json = {
        name
        for name, parser in subcommands(build_parser()).items()
        if any("--json" in action.option_strings for action in parser._actions)
    }
    assert {name.partition(" ")[0] for name in documented()} == with_json


def test_values_that_json_lacks_become_strings(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": math.nan, "b": [math.inf, (-math.inf, 1.5)]})
    assert json.loads(capsys.readouterr().out) == {"a": "nan", "b": ["inf", ["-inf", 1.5]]}
