"""``show``: the contents of tensors and objects, without running their code."""

from __future__ import annotations

import errno
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ckpt
from tests.commands import Run
from tests.fault_hooks import failing
from tests.metadata import read_metadata
from tests.python.inspection.test_diff import shards
from tests.support import (
    DTYPES,
    StateDict,
    data_files,
    flip_bit,
    place_of,
    random_tensor,
    save,
    stock_save,
)
from torch_ckpt import Checkpoint, CheckpointError
from torch_ckpt.inspection.show import Place, ShownObject, ShownTensor, Statistics, show

STATE: StateDict = {
    "layers.10.weight": torch.arange(600, dtype=torch.float32).view(20, 30),
    "layers.9.weight": torch.ones(3),
    "step": 7,
    "config": {"betas": (0.9, 0.95)},
}


class Custom:
    """Class that is not allow-listed."""


def shown(path: Path, name: str, **options: Any) -> Any:
    (item,) = show(path, [name], **options).items
    return item


def shown_tensor(tmp_path: Path, tensor: torch.Tensor, **options: Any) -> ShownTensor:
    save({"t": tensor}, tmp_path / "c")
    item = shown(tmp_path / "c", "t", **options)
    assert isinstance(item, ShownTensor)
    return item


@pytest.mark.parametrize("write", [save, stock_save])
def test_a_tensor_is_shown_with_statistics_values_and_locations(write: Any, tmp_path: Path) -> None:
    write(STATE, tmp_path)
    item = shown(tmp_path, "layers.10.weight", first=3)
    info = place_of(read_metadata(tmp_path), "layers.10.weight")
    assert (item.dtype, item.shape, item.bytes) == ("float32", (20, 30), 2400)
    assert item.first == [0.0, 1.0, 2.0]
    assert item.places == [Place(info.relative_path, info.offset, info.length, (0, 0), (20, 30))]
    assert (item.statistics.min, item.statistics.max, item.statistics.zeros) == (0, 599, 1)
    assert item.statistics.mean == pytest.approx(299.5)
    expected = STATE["layers.10.weight"].double().std(correction=0)
    assert item.statistics.std == pytest.approx(float(expected))


def test_a_tensor_of_many_shards_has_the_statistics_of_the_full_tensor(tmp_path: Path) -> None:
    # More than is read at once; the limit is within the second shard.
    tensor = torch.randn(3000, 500, generator=torch.Generator().manual_seed(5)) * 1e-3 + 1e3
    halves = [((0, 0), (1700, 500)), ((1700, 0), (1300, 500))]
    shards(tmp_path / "c", "t", tensor, halves)
    item = shown(tmp_path / "c", "t", first=50)
    assert [(place.offsets, place.sizes) for place in item.places] == halves
    assert item.first == tensor.reshape(-1)[:50].tolist()
    wide = tensor.double()
    assert (item.statistics.min, item.statistics.max) == (float(wide.min()), float(wide.max()))
    assert item.statistics.mean == pytest.approx(float(wide.mean()), rel=1e-14)
    assert item.statistics.std == pytest.approx(float(wide.std(correction=0)), rel=1e-9)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            torch.tensor([math.nan, math.inf, -math.inf, -1.0, 3.0, 0.0, -0.0]),
            Statistics(-1.0, 3.0, 0.5, 1.5, 2, 1, 2),
        ),
        (
            torch.tensor([math.nan, math.inf]),
            Statistics(None, None, None, None, 0, 1, 1),
        ),
        (torch.empty(0), None),
        (torch.empty(3, 0), None),
    ],
    ids=["some not finite", "none finite", "empty", "rows without elements"],
)
def test_only_finite_values_have_statistics(
    tmp_path: Path, values: torch.Tensor, expected: Statistics | None
) -> None:
    item = shown_tensor(tmp_path, values)
    assert item.statistics == expected
    assert len(item.first) == min(values.numel(), 6)
    line = "  no finite value, 1 NaN, 1 infinite value"
    assert (line in item.lines()) is (expected is not None and expected.min is None)


@pytest.mark.parametrize(
    ("tensor", "extremes"),
    [
        (torch.tensor([2**64 - 1, 5, 2**63], dtype=torch.uint64), (5, 2**64 - 1)),
        (torch.tensor([-(2**63), 2**63 - 1, 1]), (-(2**63), 2**63 - 1)),
        (torch.tensor([-128, 127, 0], dtype=torch.int8), (-128, 127)),
        (torch.tensor([True, False]), (False, True)),
        (torch.tensor([3 + 4j, 0, -1j]), (0.0, 5.0)),
    ],
    ids=lambda value: str(value.dtype) if isinstance(value, torch.Tensor) else "",
)
def test_the_extremes_of_integers_are_exact_and_those_of_complex_numbers_are_magnitudes(
    tmp_path: Path, tensor: torch.Tensor, extremes: tuple[Any, Any]
) -> None:
    item = shown_tensor(tmp_path, tensor)
    assert item.statistics is not None
    assert (item.statistics.min, item.statistics.max) == extremes
    assert item.statistics.zeros == int((tensor == 0).sum())
    assert item.first == tensor.tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_of_any_dtype_is_shown(dtype: torch.dtype, tmp_path: Path) -> None:
    item = shown_tensor(tmp_path, random_tensor((5, 7), dtype))
    assert item.dtype == str(dtype).removeprefix("torch.")
    assert len(item.first) == (6 if item.statistics is not None else 0)


def test_a_name_with_brackets_is_matched_exactly_if_it_exists(tmp_path: Path) -> None:
    save({"lr[1]": torch.ones(1), "lr1": torch.zeros(1)}, tmp_path)
    assert shown(tmp_path, "lr[1]").first == [1.0]


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (
            None,
            "config.betas layers.1 layers.1.bias layers.9.weight layers.10 layers.10.weight step",
        ),
        (["layers.1"], "layers.1 layers.1.bias"),
        (["config", "layers.9"], "config.betas layers.9.weight"),
    ],
    ids=str,
)
def test_a_prefix_selects_all_names_below_it_in_numerical_order(
    tmp_path: Path, patterns: list[str] | None, names: str
) -> None:
    save({**STATE, "layers.1": 1, "layers.1.bias": 2, "layers.10": 3}, tmp_path)
    selected = [patterns] if patterns else []
    assert [item.name for item in show(tmp_path, *selected).items] == names.split()


def test_wrong_patterns_and_options_are_refused(tmp_path: Path) -> None:
    save(STATE, tmp_path)
    with pytest.raises(torch_ckpt.CheckpointError, match=r"no name matches heads\.\*\."):
        show(tmp_path, ["layers.*", "heads.*"])
    with pytest.raises(ValueError, match="first must not be negative"):
        show(tmp_path, first=-1)
    with pytest.raises(ValueError, match="names must be a list of patterns"):
        show(tmp_path, "layers.*")


def test_an_object_is_shown_as_its_repr(tmp_path: Path) -> None:
    save(STATE, tmp_path)
    item = shown(tmp_path, "config.betas")
    assert isinstance(item, ShownObject)
    assert item.value == (0.9, 0.95)
    assert list(item.lines())[1] == "  (0.9, 0.95)"


def test_an_object_of_another_class_is_unpickled_only_if_allowed(tmp_path: Path) -> None:
    save({"custom": Custom()}, tmp_path)
    item = shown(tmp_path, "custom")
    assert item.value is None
    assert "not unpickled: " in str(list(item.lines()))
    assert "Custom" in item.refused
    assert isinstance(shown(tmp_path, "custom", allow_pickle=True).value, Custom)


def test_a_long_object_is_truncated(tmp_path: Path) -> None:
    save({"table": {1: [f"entry {i}" * 20 for i in range(100)]}}, tmp_path)
    lines = list(shown(tmp_path, "table.1").lines())
    assert lines[-2] == "  and 160 more lines"
    assert len(lines) == 43


def test_damaged_values_are_named_and_the_others_are_shown(tmp_path: Path, run: Run) -> None:
    save(STATE, tmp_path)
    info = place_of(read_metadata(tmp_path), "layers.10.weight")
    flip_bit(tmp_path / info.relative_path, info.offset + info.length // 2, 3)
    report = show(tmp_path)
    assert [item.name for item in report.items] == ["config.betas", "layers.9.weight", "step"]
    ((name, what),) = report.damaged
    assert name == "layers.10.weight"
    assert "CRC-32" in what
    assert not report.ok
    last = run("show", tmp_path, code=1).splitlines()[-1]
    assert last.startswith("damaged: layers.10.weight: ")
    data_files(tmp_path)[0].unlink()
    lost = show(tmp_path, ["layers.*"]).damaged
    assert [name for name, _ in lost] == ["layers.9.weight", "layers.10.weight"]
    assert all(what.endswith("No such file or directory") for _, what in lost)


def test_an_io_error_is_not_damage(tmp_path: Path) -> None:
    save(STATE, tmp_path)
    too_many = pytest.raises(OSError, match="Too many open files")
    with failing("openat2", errno.EMFILE, data_files(tmp_path)[0]), too_many:
        show(tmp_path)


def test_the_command_line_prints_the_selected_values(tmp_path: Path, run: Run) -> None:
    save(STATE, tmp_path)
    lines = run("show", tmp_path, "layers.1*", "step", "--first", "2").splitlines()
    assert lines[:3] == [
        "layers.10.weight: float32 [20, 30], 2.4 kB",
        "  min 0, max 599, mean 299.5, std 173.205, 1 zero",
        "  values 0, 1, ...",
    ]
    assert lines[4:6] == ["step: an object, 1.3 kB", "  7"]


def test_the_command_line_writes_all_values_as_json(tmp_path: Path, run: Run) -> None:
    save(STATE | {"bad": torch.tensor([math.nan, 1j])}, tmp_path)
    items = {item["name"]: item for item in run.json("show", tmp_path)["items"]}
    assert items["step"]["value"] == 7
    # JSON has no tuples.
    assert items["config.betas"]["text"] == "(0.9, 0.95)"
    assert items["layers.10.weight"]["statistics"]["max"] == 599
    assert items["bad"]["first"][1] == "1j"


def test_an_object_that_this_machine_cannot_decode_does_not_hide_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_stored: Checkpoint, name: str) -> None:
        raise CheckpointError(f"{name} needs CUDA")

    save(STATE, tmp_path)
    monkeypatch.setattr(Checkpoint, "read_object", fail)
    report = show(tmp_path)
    refused = [item.refused for item in report.items if isinstance(item, ShownObject)]
    assert refused == ["not unpickled: config.betas needs CUDA", "not unpickled: step needs CUDA"]
    assert len(report.items) > len(refused)
