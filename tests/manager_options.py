"""Generates the tables of options in docs/manager.md from the signatures and the docstrings.

Run ``python -m tests.manager_options`` to update it.
"""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import is_dataclass
from pathlib import Path

from benchmarks.blocks import replace_block
from torch_ckpt import CheckpointManager, Retention
from torch_ckpt.manager import AutoInterval, Preemption, SaveOptions

PAGE = Path(__file__).parents[1] / "docs" / "manager.md"
BEGIN, END = "<!-- options: begin -->", "<!-- options: end -->"

#: Options of the manager that are objects with options of their own.
OBJECTS = {
    "interval": AutoInterval,
    "keep": Retention,
    "preemption": Preemption,
    "saves": SaveOptions,
}

_ARGUMENT = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.M)


def described(kind: type) -> dict[str, str]:
    """Reads the description of each argument in the docstring of a class, as Markdown."""
    text = inspect.getdoc(kind) or ""
    section = re.split(r"\n(?:Args|Attributes):\n", text)[1].partition("\n\n")[0]
    return {name: _markdown(words) for name, words in _ARGUMENT.findall(section)}


def table(kind: type) -> str:
    """Makes a table with a row for each option of a class: name, default, meaning.

    Raises:
        KeyError: an option has no description.
    """
    words = described(kind)
    lines = ["| option | default | |", "|---|---|---|"]
    for name, parameter in inspect.signature(kind).parameters.items():
        if parameter.kind is not parameter.VAR_KEYWORD:
            lines.append(f"| `{name}` | {_default(parameter)} | {words[name]} |")
    return "\n".join([*lines, ""])


def tables() -> str:
    """Makes the table of the manager, then the tables of the objects that it accepts."""
    return table(CheckpointManager) + "".join(
        f"\n### `{argument}={kind.__name__}(...)`\n\n{table(kind)}"
        for argument, kind in OBJECTS.items()
    )


def filled(text: str) -> str:
    """Replaces the tables in a document by the current ones."""
    return replace_block(text, BEGIN, END, tables())


def _default(parameter: inspect.Parameter) -> str:
    default = parameter.default
    if default is parameter.empty:
        return ""
    # An object with the defaults is shown without its options.
    return f"`{type(default).__name__}()`" if is_dataclass(default) else f"`{default!r}`"


def _markdown(words: str) -> str:
    words = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", " ".join(words.split()))
    return words.replace("``", "`").replace("|", r"\|")


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
    sys.exit(0)
