"""Progress of a long operation: a bar on standard error, or a callback."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from torch_ckpt._base.formatting import duration, printable, size

_BAR_LENGTH = 20

# Columns for the text after the title: "100% of 999.9 MB, 999.9 MB/s, 59 min left".
_TEXT_LENGTH = 42


@dataclass(frozen=True)
class Progress:
    """The progress of this rank, in bytes. The counts never decrease.

    Attributes:
        bytes_planned: total number of bytes to write or read.
        bytes_staged: bytes copied from the tensors (saves only).
        bytes_done: bytes written, or bytes read into their destination.
    """

    bytes_planned: int
    bytes_staged: int
    bytes_done: int


#: None or False reports no progress. True shows a bar on standard error on rank 0. A function is
#: called with a :class:`Progress` several times per second, on the calling thread or, for a
#: background save, on the save's thread.
ProgressOption = bool | Callable[[Progress], None] | None


def stderr_is_terminal() -> bool:
    """Returns True if standard error is a terminal that can redraw a line."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    return is_terminal and os.environ.get("TERM") != "dumb"


class ProgressBar:
    """A progress bar in one line on standard error. On a terminal the line is redrawn. Otherwise it
    is written only once, at the end.

    Args:
        title: the text before the bar.
        total: total number of bytes; None takes it from the first :class:`Progress`.
        seconds_between: minimum time between two drawings.
        erase: erase the bar at the end, and write nothing if standard error is not a terminal.
    """

    def __init__(
        self,
        title: str,
        total: int | None = None,
        *,
        seconds_between: float = 0.1,
        erase: bool = False,
    ) -> None:
        self._title = printable(title)
        self._total = total
        self._seconds_between = seconds_between
        self._erase = erase
        self._done = 0
        self._started_at = time.monotonic()
        self._drawn_at = -math.inf
        self._redraws = stderr_is_terminal()

    def update(self, progress: Progress) -> None:
        """Draws the bar, unless it was drawn less than ``seconds_between`` seconds ago."""
        self._done = progress.bytes_done
        if self._total is None:
            self._total = progress.bytes_planned
        now = time.monotonic()
        if self._redraws and now - self._drawn_at >= self._seconds_between:
            self._drawn_at = now
            self._write(f"\r{self._line()}\x1b[K")

    def close(self) -> None:
        """Writes the last line, or erases it."""
        if not self._redraws:
            self._write("" if self._erase else f"{self._text()}\n")
        elif not self._erase:
            self._write(f"\r{self._line()}\x1b[K\n")
        elif self._drawn_at > -math.inf:
            self._write("\r\x1b[K")

    def _share(self) -> float:
        return min(self._done / self._total, 1.0) if self._total else 1.0

    def _status(self) -> str:
        """Returns the percentage done, the rate and the estimated time left."""
        seconds = time.monotonic() - self._started_at
        total = self._total or 0
        text = f"{self._share():.0%} of {size(total)}"
        if seconds:
            text += f", {size(self._done / seconds)}/s"
        if self._redraws and 0 < self._done < total:
            text += f", {duration(seconds * (total - self._done) / self._done)} left"
        return text

    def _text(self) -> str:
        return f"{self._title}: {self._status()}"

    def _line(self) -> str:
        """Returns the text with a bar, shortened to the width of the terminal."""
        width = shutil.get_terminal_size().columns - 1
        title = _shorten(self._title, max(width - _TEXT_LENGTH - 2, 8))
        bar = ""
        if width - _TEXT_LENGTH - len(title) - 3 >= _BAR_LENGTH:
            bar = f" {_draw_bar(self._share())}"
            width += len(bar) - _BAR_LENGTH - 1  # escape sequences take no columns
        return f"{title}:{bar} {self._status()}"[:width]

    def _write(self, text: str) -> None:
        # The operation must not fail because standard error is closed.
        with suppress(OSError, ValueError):
            if sys.stderr is not None and text:
                print(text, end="", file=sys.stderr, flush=True)


def _shorten(text: str, length: int) -> str:
    """Replaces the middle of a text by "..." if it is longer than ``length``."""
    if len(text) <= length:
        return text
    end = length // 2
    return f"{text[: length - end - 3]}...{text[len(text) - end :]}"


def _draw_bar(share: float) -> str:
    is_unicode = (sys.stderr.encoding or "").lower().startswith("utf")
    full, empty = "━─" if is_unicode else "#-"
    done = full * int(share * _BAR_LENGTH)
    rest = empty * (_BAR_LENGTH - len(done))
    return f"{done}{rest}" if os.environ.get("NO_COLOR") else f"\x1b[32m{done}\x1b[0m{rest}"


@contextmanager
def reporting(
    option: ProgressOption,
    title: str,
    rank: int | None,
    total: int,
    *,
    seconds_between: float = 0.1,
) -> Iterator[Callable[[Progress], None] | None]:
    """Block that reports the progress of an operation to a bar or a callback.

    Args:
        option: see :data:`ProgressOption`.
        title: the text before the bar.
        rank: rank of this process; None for a single process.
        total: total number of bytes.
        seconds_between: minimum time between two drawings of the bar.

    Yields:
        A function to call with the progress; None if nothing is reported.
    """
    if callable(option):
        yield option
    elif option and not rank:
        bar = ProgressBar(title, total, seconds_between=seconds_between)
        try:
            yield bar.update
        finally:
            bar.close()
    else:
        yield None
