"""Keywords of functions have types, so that type checkers and editors know them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.layers import REPOSITORY

#: Functions that torch calls with further keywords, or that pass keywords on to torch's class.
OF_TORCH = {
    "loading/reader.py: FileSystemReader.__init__",
    "loading/reader.py: FileSystemReader.read_metadata",
    "loading/reader.py: FileSystemReader.set_up_storage_reader",
    "megatron/async_writer.py: FileSystemWriterAsync.set_up_storage_writer",
    "saving/writer.py: FileSystemWriter.__init__",
    "saving/writer.py: FileSystemWriter.set_up_storage_writer",
    "training/graphs.py: GraphRecorder.__call__",
}


def functions(tree: ast.AST, within: str = "") -> Iterator[tuple[str, ast.arguments]]:
    """Yields the qualified name and the arguments of each function, also of nested ones."""
    for node in ast.iter_child_nodes(tree):
        name = within
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{within}.{node.name}".removeprefix(".")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield name, node.args
        yield from functions(node, name)


def untyped(source: str) -> Iterator[str]:
    """Yields the functions that accept keywords of any name and any type."""
    for name, arguments in functions(ast.parse(source)):
        keywords = arguments.kwarg
        if keywords is not None:
            annotation = keywords.annotation and ast.unparse(keywords.annotation)
            if annotation in (None, "Any", "typing.Any"):
                yield name


@pytest.mark.parametrize(
    "signature", ["def f(**options: Any): ...", "def f(**options): ...", "f = lambda **options: 0"]
)
def test_untyped_keywords_are_found(signature: str) -> None:
    assert len(list(untyped(signature))) == 1


@pytest.mark.parametrize(
    "signature",
    ["def f(**options: Never): ...", "def f(options: Any): ...", "def f(**o: int): ..."],
)
def test_typed_keywords_are_accepted(signature: str) -> None:
    assert list(untyped(signature)) == []


def test_only_functions_of_torchs_contracts_accept_untyped_keywords() -> None:
    package = REPOSITORY / "torch_ckpt"
    found = {
        f"{path.relative_to(package)}: {name}"
        for path in sorted([*package.rglob("*.py"), *package.rglob("*.pyi")])
        for name in untyped(path.read_text())
    }
    assert found == OF_TORCH
