"""Formatting of sizes, durations, lists and tables for messages and the command line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

# Maximum number of lines that an error lists.
_MAX_LINES = 10

#: Maximum number of names that an error or a warning lists.
MOST_NAMES = 8


def size(count: float) -> str:
    """Formats a number of bytes: "704 B", "20.9 MB". Units are powers of ten, as for disks."""
    if count < 1000:
        return f"{count:.0f} B"
    value, units = count / 1000, ["kB", "MB", "GB", "TB"]
    while value >= 999.95 and len(units) > 1:  # would otherwise be rounded to 1000.0
        value /= 1000
        del units[0]
    return f"{value:.1f} {units[0]}"


def duration(seconds: float) -> str:
    """Formats a duration in its largest unit: "40 s", "3 min", "5 h", "12 d"."""
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def printable(text: str) -> str:
    """Escapes control characters, which names in an untrusted checkpoint may contain."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def sentence(error: BaseException) -> str:
    """Returns the message of an error, without the "[Errno 2]" and the quotes of an OSError."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def plural(count: int, noun: str) -> str:
    """Formats a count with its noun: "1 file", "2 files"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def some_of(names: Sequence[str], most: int = MOST_NAMES) -> str:
    """Lists the first names: "a, b and 3 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def indented(lines: Sequence[str], most: int = _MAX_LINES) -> str:
    """Joins the first lines, indented, and adds the number of remaining lines."""
    more = [f"and {len(lines) - most} more"] if len(lines) > most else []
    return "\n".join(f"  {line}" for line in [*lines[:most], *more])


def ranks_text(ranks: Iterable[int]) -> str:
    """Formats a set of ranks: "rank 3", "ranks 0-2, 7"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    one = len(runs) == 1 and len(runs[0]) == 1
    return f"rank{'' if one else 's'} {', '.join(parts)}"


@dataclass(frozen=True)
class Table:
    """A table in a report.

    Attributes:
        header: the column titles.
        rows: the texts of each row, one per column.
        right: titles of the right-aligned columns.
        optional: titles of the columns that may be left out on a narrow terminal, the least
            important first.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: frozenset[str] = frozenset()
    optional: Sequence[str] = ()

    def lines(self) -> Iterator[str]:
        """Yields lines of aligned columns, with two spaces in between."""
        lines = [self.header, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            cells = (
                cell.rjust(width) if name in self.right else cell.ljust(width)
                for name, cell, width in zip(self.header, line, widths, strict=True)
            )
            yield "  ".join(cells).rstrip()


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, at most 200 characters, or its type name if
    there is no message."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


#: A part of a report: a line of text, or a table.
Block = str | Table


class Report:
    """Base of the dataclasses that commands print. A report defines ``lines`` or ``blocks``."""

    def lines(self) -> Iterator[str]:
        """Yields the report as plain text, with escaped names."""
        return text_lines(self.blocks())

    def blocks(self) -> Iterable[Block]:
        """Yields the lines and tables of the report."""
        return self.lines()

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def document(self) -> dict[str, Any]:
        """Returns the report as a JSON document."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]


def text_lines(blocks: Iterable[Block]) -> Iterator[str]:
    """Yields the lines of a report as plain text."""
    for block in blocks:
        if isinstance(block, Table):
            yield from block.lines()
        else:
            yield block
