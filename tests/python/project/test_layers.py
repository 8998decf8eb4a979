"""The layers in docs/design.md: imports point down, and there are no import cycles."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.layers import (
    CSRC_LAYERS,
    DESIGN,
    LAYERS,
    REPOSITORY,
    cycles,
    imports,
    includes,
    part_of,
    upward_uses,
    with_picture,
)


@pytest.fixture(scope="module")
def modules() -> dict[str, set[str]]:
    return imports(REPOSITORY / "torch_ckpt")


@pytest.fixture(scope="module")
def sources() -> dict[str, set[str]]:
    return includes(REPOSITORY / "csrc")


def test_every_module_is_in_a_package_with_a_layer(modules: dict[str, set[str]]) -> None:
    known = {part for layer in LAYERS for part in layer}
    assert {part_of(name) for name in modules} == known


def test_imports_point_down(modules: dict[str, set[str]]) -> None:
    assert upward_uses(modules, LAYERS) == []


def test_there_are_no_import_cycles(modules: dict[str, set[str]]) -> None:
    assert cycles(modules) == []


def test_there_are_at_most_a_dozen_modules_outside_of_packages() -> None:
    assert len(list((REPOSITORY / "torch_ckpt").glob("*.py"))) <= 12


def test_no_two_modules_have_one_name() -> None:
    paths = (REPOSITORY / "torch_ckpt").rglob("*.py")
    counts = Counter(path.stem for path in paths if path.stem != "__init__")
    assert [name for name, count in counts.items() if count > 1] == []


def test_includes_point_down(sources: dict[str, set[str]]) -> None:
    assert {part_of(name) for name in sources} == {part for layer in CSRC_LAYERS for part in layer}
    assert upward_uses(sources, CSRC_LAYERS) == []


def test_there_are_no_include_cycles(sources: dict[str, set[str]]) -> None:
    assert cycles(sources) == []


def test_the_picture_in_the_design_matches_the_imports() -> None:
    text = DESIGN.read_text()
    assert with_picture(text) == text, "python -m tests.layers updates it"


@pytest.mark.parametrize(
    "line",
    [
        "from torch_ckpt.low import thing",
        "import torch_ckpt.low",
        "from . import low",
        "from .low import thing",
        "from torch_ckpt import low",
        "def f():\n    from torch_ckpt.low import thing",
        "import importlib\nimportlib.import_module('torch_ckpt.low')",
        "if TYPE_CHECKING:\n    from torch_ckpt.low import Kind",
    ],
)
def test_every_form_of_import_is_found(tmp_path: Path, line: str) -> None:
    package = tmp_path / "torch_ckpt"
    package.mkdir()
    for name, text in (("__init__", ""), ("low", ""), ("high", line)):
        (package / f"{name}.py").write_text(text + "\n")
    graph = imports(package)
    assert graph["torch_ckpt.high"] - {"torch_ckpt"} == {"torch_ckpt.low"}
    assert "torch_ckpt.high uses torch_ckpt.low" in upward_uses(graph, (("",), ("low",), ("high",)))
    assert upward_uses(graph, (("high",), ("",), ("low",))) == []


def test_a_cycle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert cycles(graph) == ["a -> b -> c -> a"]
