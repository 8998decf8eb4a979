"""Writes the stubs of the extension modules from the signatures and docstrings of their bindings.

``python -m scripts.stubs --check`` fails if a committed stub is out of date.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType, WrapperDescriptorType
from typing import Any

import torch  # noqa: F401  (torch_ckpt._C needs its libraries)

MODULES = ("_core", "_C")
WIDTH = 100
PACKAGE = Path(__file__).parents[1] / "torch_ckpt"
#: Special methods that callers use.
SPECIAL = re.compile(r"__(init|len|bytes|contains|getitem|iter|enter|exit)__")
#: Types in pybind11's docstrings, and narrower types for type checkers. pybind11 converts the types
#: that are left out, too, but no caller should pass them.
NARROWER = {
    r"typing\.SupportsInt( \| typing\.SupportsIndex)?": "int",
    r"typing\.SupportsFloat( \| typing\.SupportsIndex)?": "float",
    r"os\.PathLike \| str \| bytes": "str | os.PathLike[str]",
    # pybind11 refuses a str, which is a Sequence[str].
    r"collections\.abc\.Sequence\[str\]": "list[str]",
    r'typing\.Annotated\[(.*?), "FixedSize\(\d+\)"\]': r"\1",
}
#: The modules of the types that stubs name without a module.
IMPORTED = re.compile(r"\b(collections\.abc|typing(?:_extensions)?|torch_ckpt(?:\.\w+)+)\.(\w+)")


def stub_of(module: ModuleType) -> str:
    """Returns the stub of an extension module."""
    body = "\n".join(_members(vars(module)))
    if unknown := re.findall(r"[\w:]+::\w+", body):
        raise ValueError(f"{module.__name__}: bind these classes before their uses: {unknown}")
    body = body.replace(f"{module.__name__}.", "")
    imports = {f"import {name}" for name in ("os", "torch") if re.search(rf"\b{name}\.", body)}
    imports |= {f"from {name} import {imported}" for name, imported in IMPORTED.findall(body)}
    body = IMPORTED.sub(r"\2", body)
    text = _docstring(module.__doc__, "") + "\n" + "\n".join(imports) + "\n" + body
    for command in ("check --select=I --fix-only --quiet", "format"):
        ruff = [sys.executable, "-m", "ruff", *command.split(), "--stdin-filename=stub.pyi", "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout
    return text


def _members(members: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in members.items():
        is_private = name.startswith("_") and not SPECIAL.fullmatch(name)
        # A class without a constructor has the __init__ of its base.
        if is_private or isinstance(value, WrapperDescriptorType):
            continue
        if isinstance(value, type):
            yield from _class(name, value)
        elif isinstance(value, property):
            yield f"{indent}@property"
            yield from _function(name, value.fget, indent, value.__doc__)
        elif isinstance(value, staticmethod):
            yield f"{indent}@staticmethod"
            yield from _function(name, value.__func__, indent)
        elif callable(value):
            yield from _function(name, value, indent)
        else:
            yield f"{name}: {type(value).__name__}"


def _class(name: str, value: type) -> Iterator[str]:
    base = value.__base__.__qualname__ if value.__base__.__module__ == value.__module__ else ""
    yield f"class {name}({base}):" if base else f"class {name}:"
    # pybind11 adds the list of the members to the docstring of an enumeration.
    yield _docstring((value.__doc__ or "").partition("Members:")[0], "    ")
    if enumeration := getattr(value, "__members__", None):
        yield from (f"    {member}: typing.ClassVar[{name}]" for member in enumeration)
    else:
        yield from list(_members(vars(value), "    ")) or ["    ..."]


def _function(name: str, function: Any, indent: str, comment: str | None = None) -> Iterator[str]:
    signature, _, documentation = function.__doc__.partition("\n")
    match = re.fullmatch(r"\w*\((.*)\) -> (.*)", signature)
    if match is None:
        raise ValueError(f"{name}: {signature}: the binding has no signature, or several")
    parameters = ", ".join(map(_parameter, _split(match[1])))
    yield f"{indent}def {name}({parameters}) -> {_type(match[2])}:"
    yield _docstring(comment or documentation, indent + "    ") or f"{indent}    ..."


def _parameter(text: str) -> str:
    name, _, annotation = text.partition(": ")
    if name in ("self", "arg0"):  # arg0: of a property
        return "self"
    if not annotation:
        return name
    annotation, equals, default = annotation.partition(" = ")
    annotation = _type(annotation)
    if default == "None" and annotation != "typing.Any" and not annotation.endswith("| None"):
        annotation += " | None"
    return f"{name}: {annotation}{equals}{default}"


def _split(parameters: str) -> list[str]:
    """Splits at the commas that are not in brackets."""
    parts, depth = [""], 0
    for character in parameters:
        depth += (character in "[({") - (character in "])}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def _type(annotation: str) -> str:
    for pattern, narrower in NARROWER.items():
        annotation = re.sub(pattern, narrower, annotation)
    return annotation


def _docstring(documentation: str | None, indent: str) -> str:
    text = inspect.cleandoc(documentation or "")
    line = f'{indent}"""{text}"""'
    if not text or ("\n" not in text and len(line) <= WIDTH):
        return line if text else ""
    # The formatter adds the closing quotes to a line of its own.
    wrap = partial(textwrap.fill, width=WIDTH - 3, initial_indent=indent, subsequent_indent=indent)
    return "\n\n".join(map(wrap, f'"""{text}'.split("\n\n"))) + f'\n{indent}"""'


def main() -> None:
    for name in MODULES:
        stub = stub_of(import_module(f"torch_ckpt.{name}"))
        path = PACKAGE / f"{name}.pyi"
        if "--check" not in sys.argv:
            path.write_text(stub)
        elif stub != path.read_text():
            sys.exit(f"torch_ckpt/{name}.pyi differs from its bindings. Run `make stubs`.")


if __name__ == "__main__":
    main()
