"""Runs the Python code and the commands of documents, as after a plain ``pip install``.

    python -m tests.snippets DOCUMENT...

torch is imported once. Each document runs in a forked process of its own, in an empty directory:
its blocks run in order and share a namespace. Modules of distributions that torch_ckpt does not
require, directly or not, cannot be imported. Buckets (``s3://``, ``gs://``) are in memory. A block
behind ``<!-- not run: REASON -->`` is skipped.

Prints a JSON document: for each document the error and the line of the failed block, or null.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import re
import shlex
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.forked import Answering, end_of

# The environment of a checkout and the one that all checkouts share.
_INSTALLED = ("site-packages", "dist-packages")

# As torchrun sets it.
_ENVIRONMENT_OF_ONE_RANK = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}

_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n+)?```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Snippet:
    """A block of a document.

    Attributes:
        line: line number of its first line of code, from 1.
        language: language of the fence; may be empty.
        code: its text.
        reason: why it is not run; None if it is run.
    """

    line: int
    language: str
    code: str
    reason: str | None


def snippets_of(document: Path) -> list[Snippet]:
    """Returns all blocks of a document."""
    text = document.read_text()
    return [
        Snippet(
            text.count("\n", 0, match.start("code")) + 1,
            match["language"],
            match["code"],
            match["reason"],
        )
        for match in _BLOCK.finditer(text)
    ]


def commands_of(code: str) -> Iterator[list[str]]:
    """Yields the commands of a block: those behind ``$``, or all lines if no line has a ``$``."""
    lines = code.splitlines()
    if any(line.startswith("$ ") for line in lines):
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    for line in lines:
        if words := shlex.split(line, comments=True):
            yield words


class _PlainInstall(PathFinder):
    """Finds no module of a distribution that torch_ckpt does not require."""

    _hidden: frozenset[str] = frozenset()

    @classmethod
    def install(cls) -> None:
        """Replaces Python's own finder."""
        required = _required("torch")
        cls._hidden = frozenset(
            module
            for module, names in importlib.metadata.packages_distributions().items()
            if module not in ("torch_ckpt", "tests") and required.isdisjoint(map(_normal, names))
        )
        sys.meta_path[:] = [cls if finder is PathFinder else finder for finder in sys.meta_path]

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is None and fullname in cls._hidden:
            # It may be vendored: setuptools puts vendored packages on the path.
            path = [one for one in sys.path if Path(one).name not in _INSTALLED]
        return super().find_spec(fullname, path, target)


def _required(distribution: str) -> set[str]:
    """Returns a distribution and all that it requires without extras, by normalized name."""
    found: set[str] = set()
    left = [distribution]
    while left:
        name = _normal(left.pop())
        if name in found:
            continue
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add(name)
        left += [
            re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
            for requirement in requirements
            if "extra ==" not in requirement
        ]
    return found


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _make_buckets_memory() -> None:
    import fsspec
    from fsspec.implementations.memory import MemoryFileSystem

    class Bucket(MemoryFileSystem):  # type: ignore[misc]
        store: dict[str, Any] = {}  # noqa: RUF012
        pseudo_dirs = [""]  # noqa: RUF012

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            path = path.partition("://")[2] if "://" in path else path
            return f"/{path.strip('/')}" if path.strip("/") else ""

    for protocol in ("s3", "gs"):
        fsspec.register_implementation(protocol, Bucket, clobber=True)


def run(document: Path) -> str | None:
    """Runs a document's blocks in this process. Returns the failure, or None."""
    from torch_ckpt import cli

    namespace: dict[str, Any] = {"__name__": "__main__"}
    for snippet in snippets_of(document):
        if snippet.reason is not None:
            continue
        place = f"{document.name}:{snippet.line}"
        try:
            if snippet.language == "python":
                # Makes tracebacks show the document's lines.
                code = "\n" * (snippet.line - 1) + snippet.code
                exec(compile(code, str(document), "exec"), namespace)
            elif snippet.language == "console":
                for words in commands_of(snippet.code):
                    if words[0] == "torch-ckpt" and (code := cli.main(words[1:])) != 0:
                        return f"{place}: {shlex.join(words)} ends with {code}"
        except BaseException:
            return f"{place}: {traceback.format_exc()}"
    return None


def _run_in_child(document: Path) -> str | None:
    def work(_send: object) -> str | None:
        # Standard output carries the report.
        os.dup2(2, 1)
        with tempfile.TemporaryDirectory() as directory:
            os.chdir(directory)
            os.environ |= _ENVIRONMENT_OF_ONE_RANK
            outcome = run(document)
            os.chdir("/")
        sys.stdout.flush()
        return outcome

    child = Answering(work)
    outcome: str | None = child.answer()
    code = end_of(child.pid)
    return outcome or (f"{document.name}: the process ended with {code}" if code else None)


def main(documents: Sequence[str]) -> None:
    _PlainInstall.install()
    # Imported once, before the forks. Optimizers import the compiler.
    importlib.import_module("torch._dynamo")

    import torch_ckpt.cli  # noqa: F401

    _make_buckets_memory()
    print(json.dumps({name: _run_in_child(Path(name).absolute()) for name in documents}))


if __name__ == "__main__":
    main(sys.argv[1:])
