"""Public names of torch_ckpt, which import their modules at the first use."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import import_module

import pytest

import torch_ckpt
from tests.layers import REPOSITORY

CHANGELOG = REPOSITORY / "CHANGELOG.md"


def imported_for_type_checkers() -> set[tuple[str, str]]:
    """Returns (module, name) of the imports of the stub."""
    file = REPOSITORY / "torch_ckpt" / "__init__.pyi"
    return {
        (str(node.module), alias.name)
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name == alias.asname  # otherwise type checkers take it for a private name
    }


def test_a_name_is_in_the_module_that_type_checkers_see() -> None:
    for module, name in imported_for_type_checkers():
        assert getattr(torch_ckpt, name) is getattr(import_module(module), name)


def test_all_and_dir_list_every_name_that_type_checkers_see() -> None:
    names = {name for _, name in imported_for_type_checkers()}
    assert names == set(torch_ckpt.__all__)
    assert names <= set(dir(torch_ckpt))


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'torch_ckpt' has no attribute 'savee'"):
        torch_ckpt.savee  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("name", torch_ckpt._REMOVED)
def test_a_removed_name_is_an_attribute_error_that_names_the_replacement(name: str) -> None:
    replacement = torch_ckpt._REMOVED[name]
    with pytest.raises(AttributeError) as caught:
        getattr(torch_ckpt, name)
    assert str(caught.value) == f"torch_ckpt.{name} was removed; use {replacement}"
    assert name not in torch_ckpt.__all__
    if re.fullmatch(r"[\w.]+", replacement):
        module, _, moved = replacement.rpartition(".")
        assert getattr(import_module(module), moved) is not None


def test_the_changelog_lists_each_removed_name_with_its_replacement() -> None:
    rows = re.findall(r"^  \| `(\w+)` \| (.*) \|$", CHANGELOG.read_text(), re.M)
    listed = {name: replacement.replace("`", "") for name, replacement in rows}
    assert {
        name: replacement for name, replacement in listed.items() if name in torch_ckpt._REMOVED
    } == torch_ckpt._REMOVED


def test_there_are_at_most_36_public_names() -> None:
    assert len(torch_ckpt.__all__) <= 36


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import torch_ckpt", "False"),
        ("import torch_ckpt; torch_ckpt.Corrupt; torch_ckpt.Retention", "False"),
        ("import torch_ckpt; torch_ckpt.verify", "False"),
        ("import torch_ckpt; torch_ckpt.save", "True"),
        ("import torch_ckpt; torch_ckpt._C", "True"),
        ("from torch_ckpt import *", "True"),
    ],
)
def test_torch_is_imported_at_the_first_use_of_a_name_that_needs_it(
    code: str, expected: str
) -> None:
    code += "; import sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


_EXIT_ORDER = """
import atexit, logging, multiprocessing.util, sys, weakref
import torch_ckpt
from torch_ckpt._base.life_cycle import Part, register
import torch

class Object:
    pass

kept = Object()
weakref.finalize(kept, print, "finalizer")
multiprocessing.util.Finalize(None, print, ("multiprocessing",), exitpriority=0)
logging.getLogger().addHandler(handler := logging.StreamHandler())
handler.close = lambda: print("logging")
atexit.register(print, "registered by the program")
register(Part.CALLS, at_exit=lambda: print("torch_ckpt"))
"""


def test_saves_end_before_the_modules_that_they_need_even_if_torch_is_imported_later() -> None:
    done = subprocess.run([sys.executable, "-c", _EXIT_ORDER], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert lines[:2] == ["registered by the program", "torch_ckpt"]
    assert set(lines[2:]) == {"finalizer", "multiprocessing", "logging"}
