"""Prints reports: coloured, with fitted tables, on terminals; otherwise as plain text.

Colours require the optional package ``rich``, which is imported only if stdout is a terminal.
"""

from __future__ import annotations

import enum
import json
import math
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from torch_ckpt._base.formatting import Block, Table, printable, text_lines


class ExitCode(enum.IntEnum):
    """An exit code; ``meaning`` is its description in ``--help`` and docs/cli.md."""

    meaning: str

    def __new__(cls, code: int, meaning: str) -> ExitCode:
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member

    SUCCESS = 0, "the command succeeded and found nothing wrong"
    FINDING = (
        1,
        "ls, show, verify: something is damaged or missing; diff: the checkpoints differ; "
        "gc, delete: a step to be deleted is in use; doctor: an assumption does not hold",
    )
    ERROR = (
        2,
        "the command line is invalid, or the command failed (for example, no checkpoint, no "
        "permission or no space); verify: no damage was found, but part of the checkpoint could "
        "not be read",
    )
    INTERRUPTED = 130, "Ctrl-C stopped the command"
    CLOSED_PIPE = 141, "the output pipe was closed before the result was known"


# Omit other columns rather than make a left-aligned column narrower than this.
_LEAST_WIDTH = 24

_GAP = 2

# Precedes the continuation of a wrapped cell.
_INDENT = "  "

# Characters after which a cell may be wrapped, in order of preference.
_SEPARATORS = ("./, ", "_")

# Styles of labels and verdicts in lines, and of states in tables.
_STYLES = {
    r"^(damaged|missing|incomplete)(?=: )": "red",
    r"(?<=: )([0-9]+ \w+ (damaged|missing|incomplete|not read)(, )?)+$": "red",
    r"(?<=: |  )fails(?= \(|  )": "red",
    r"(?<= are )different\b.*(?=: )": "red",
    r"(?<=  )(missing|too short|unreadable)$": "red",
    r"^(not read|not part of the checkpoint|not verifiable[^:]*)(?=: )": "yellow",
    r"^(note|in use|not removed|unfinished)(?=: )": "yellow",
    r"(?<=: |  )unknown(?= \(|  )": "yellow",
    r"(?<=  )unreferenced$": "yellow",
    r"(?<=: )no damage found(, .*)?$": "green",
    r"(?<=: |  )holds(?= \(|  )": "green",
    r"(?<= are )equal\b.*(?=: )": "green",
    r"(?<=  )(ok$|yes(?=  ))": "green",
    r"^\(narrow terminal, .*": "dim",
}


def print_json(document: dict[str, Any]) -> None:
    """Prints one JSON document. NaN and infinities, which JSON lacks, become strings."""
    print(json.dumps(_without_infinities(document), indent=2, allow_nan=False))


def _without_infinities(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_infinities(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinities(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def print_error(text: str) -> None:
    """Prints one line on standard error."""
    print(f"torch-ckpt: {printable(text)}", file=sys.stderr)


def print_blocks(blocks: Iterable[Block]) -> None:
    """Prints the lines and tables of a report."""
    if not sys.stdout.isatty():
        _print_plain(blocks)
        return
    fitted = _fit_all(blocks, shutil.get_terminal_size().columns)
    try:
        _print_styled(fitted)
    except ImportError:
        _print_plain(fitted)


def _print_plain(blocks: Iterable[Block]) -> None:
    for line in text_lines(blocks):
        print(line)


def _print_styled(blocks: Iterable[Block]) -> None:
    from rich.console import Console
    from rich.text import Text

    # Use one Text for all lines: rich's own tables take a millisecond per row.
    text = Text()
    for block in blocks:
        header, *rows = text_lines([block])
        text.append(header, "bold" if isinstance(block, Table) else "")
        text.append("".join(f"\n{row}" for row in rows) + "\n")
    for pattern, style in _STYLES.items():
        text.highlight_regex(re.compile(pattern, re.MULTILINE), style)
    Console(file=sys.stdout, soft_wrap=True, highlight=False).print(text, end="")


def _fit_all(blocks: Iterable[Block], width: int) -> Iterator[Block]:
    for block in blocks:
        if not isinstance(block, Table):
            yield block
            continue
        table = fit_table(block, width)
        yield table
        if hidden := [title for title in block.header if title not in table.header]:
            yield f"(narrow terminal, not shown: {', '.join(hidden)})"


def fit_table(table: Table, width: int) -> Table:
    """Fits a table into a terminal's width.

    Omits as few optional columns as possible. If the table is still too wide, wraps left-aligned
    cells, and omits columns (optional ones first, then the last ones) until these have enough room.
    """
    candidates = [table]
    for title in table.optional:
        candidates.append(_leave_out(candidates[-1], title))
    for candidate in candidates:
        if _excess(candidate, width) <= 0:
            return candidate
    while len(candidates[-1].header) > 1:
        candidates.append(_leave_out(candidates[-1], candidates[-1].header[-1]))
    for candidate in candidates:
        widths = _widths(candidate)
        flexible = [n for n, title in enumerate(candidate.header) if title not in table.right]
        room = sum(max(widths[n] - _LEAST_WIDTH, 0) for n in flexible)
        if _excess(candidate, width) <= room:
            return _wrap_cells(candidate, _narrow(widths, flexible, _excess(candidate, width)))
    return _wrap_cells(candidates[-1], [width])


def _widths(table: Table) -> list[int]:
    return [max(map(len, column)) for column in zip(table.header, *table.rows, strict=True)]


def _excess(table: Table, width: int) -> int:
    """Returns the number of characters by which a table exceeds the terminal's width."""
    widths = _widths(table)
    return sum(widths) + _GAP * (len(widths) - 1) - width


def _leave_out(table: Table, title: str) -> Table:
    column = list(table.header).index(title)
    header, *rows = [[*line[:column], *line[column + 1 :]] for line in (table.header, *table.rows)]
    return replace(table, header=header, rows=rows)


def _narrow(widths: list[int], flexible: list[int], excess: int) -> list[int]:
    """Shrinks the widest flexible columns by ``excess`` characters in total."""
    narrowed = list(widths)
    for _ in range(excess):
        narrowed[max(flexible, key=narrowed.__getitem__)] -= 1
    return narrowed


def _wrap_cells(table: Table, widths: list[int]) -> Table:
    """Wraps cells that are too long onto additional rows."""
    rows: list[Sequence[str]] = []
    for row in table.rows:
        cells = [_wrap(cell, width) for cell, width in zip(row, widths, strict=True)]
        rows += zip_longest(*cells, fillvalue="")
    return replace(table, rows=rows)


def _wrap(cell: str, width: int) -> list[str]:
    """Breaks a text into lines, after a separator if one is in the second half of a line."""
    width = max(width, 2 * len(_INDENT) + 1)
    lines = []
    while len(cell) > width:
        ends = [max(cell.rfind(mark, 0, width) for mark in marks) + 1 for marks in _SEPARATORS]
        end = next((end for end in ends if end > width // 2), width)
        lines.append(cell[:end].rstrip())
        cell = _INDENT + cell[end:].lstrip()
    return [*lines, cell]
