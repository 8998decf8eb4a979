"""Generates the table of options in docs/manager.md from the signature and the docstrings.

Run ``python -m tests.manager_options`` to update it.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

from benchmarks.blocks import replace_block
from torch_ckpt import CheckpointManager
from torch_ckpt.retention import Retention

PAGE = Path(__file__).parents[1] / "docs" / "manager.md"
BEGIN, END = "<!-- options: begin -->", "<!-- options: end -->"

_ARGUMENT = re.compile(r"^    (\w[\w, ]*): (.*(?:\n {8}.*)*)", re.M)


def described(kind: type) -> dict[str, str]:
    """Reads the description of each argument in the docstring of a class, as Markdown."""
    text = inspect.getdoc(kind) or ""
    section = text.partition("\nArgs:\n")[2].partition("\n\n")[0]
    return {
        name: _markdown(words)
        for names, words in _ARGUMENT.findall(section)
        for name in names.split(", ")
    }


def table() -> str:
    """Makes a table with a row for each option of the manager: name, default, meaning.

    Raises:
        KeyError: an option has no description.
    """
    words = {**described(CheckpointManager), **described(Retention)}
    lines = ["| option | default | |", "|---|---|---|"]
    for name, parameter in inspect.signature(CheckpointManager).parameters.items():
        default = "" if parameter.default is parameter.empty else f"`{parameter.default!r}`"
        shown = f"**{name}" if parameter.kind is parameter.VAR_KEYWORD else name
        lines.append(f"| `{shown}` | {default} | {words[name]} |")
    return "\n".join([*lines, ""])


def filled(text: str) -> str:
    """Replaces the table in a document by the current one."""
    return replace_block(text, BEGIN, END, table())


def _markdown(words: str) -> str:
    words = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", " ".join(words.split()))
    return words.replace("``", "`").replace("|", r"\|")


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
    sys.exit(0)
