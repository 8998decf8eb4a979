"""The stubs of the extension modules name the parameters that pybind11 documents.

``make lint`` runs mypy's stubtest, which checks the names but not the signatures of such modules.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch  # noqa: F401  (torch_ckpt._C needs its libraries)

from tests.layers import REPOSITORY

_Signature = list[tuple[str, bool]]


def stub_functions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from stub_functions(node.body, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            is_property = any(getattr(d, "id", "") == "property" for d in node.decorator_list)
            if not is_property and not (node.name.startswith("__") and node.name != "__init__"):
                yield prefix + node.name, node


def stub_signature(function: ast.FunctionDef) -> _Signature:
    """Returns the name of each parameter, and whether it has a default."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    found = [(a.arg, i >= first_default) for i, a in enumerate(positional)]
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    found += [(a.arg, default is not None) for a, default in keywords]
    return [parameter for parameter in found if parameter[0] != "self"]


def documented_signature(documentation: str) -> _Signature | None:
    """Returns the same from the first line of pybind11's docstring."""
    match = re.match(r"\w+\((.*)\) -> ", documentation)
    if match is None:
        return None
    found, depth, begin = [], 0, 0
    text = match[1] + ","
    for at, character in enumerate(text):
        depth += (character in "[({<") - (character in "])}>")
        if character == "," and depth == 0:
            parameter = text[begin:at].strip()
            begin = at + 1
            if parameter and parameter != "*":
                found.append((parameter.split(":")[0].strip(), " = " in parameter))
    return [parameter for parameter in found if parameter[0] != "self"]


def attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


@pytest.mark.parametrize("name", ["_C", "_core"])
def test_a_stub_names_the_parameters_of_every_function(name: str) -> None:
    module = import_module(f"torch_ckpt.{name}")
    stub = ast.parse((REPOSITORY / "torch_ckpt" / f"{name}.pyi").read_text())
    different, compared = {}, 0
    for path, function in stub_functions(stub.body):
        documented = documented_signature(attribute(module, path).__doc__ or "")
        # Methods whose parameters have no names, so that pybind11 numbers them.
        if documented is None or any(re.fullmatch(r"arg\d+", name) for name, _ in documented):
            continue
        compared += 1
        if documented != stub_signature(function):
            different[path] = documented, stub_signature(function)
    assert different == {}
    assert compared > 15
