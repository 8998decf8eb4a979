"""Progress of a save or a load: a bar on a terminal, or a function of the caller's."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from torch_ckpt._base.formatting import printable, size


@dataclass(frozen=True)
class Progress:
    """Bytes moved so far. All counts are of this rank and only grow.

    Attributes:
        bytes_planned: what will be written or read in all.
        bytes_staged: what has been copied from the tensors (saves only).
        bytes_done: what has been written, or read into its target.
    """

    bytes_planned: int
    bytes_staged: int
    bytes_done: int


#: ``None`` or False: silent. True: a bar on rank 0. Else called with a :class:`Progress` a few
#: times a second, on the calling thread or, of a background save, on that save's.
ProgressOption = bool | Callable[[Progress], None] | None


class Reporter:
    """Shows the progress of one save or load, as the option says. A context manager.

    Args:
        option: see :data:`ProgressOption`.
        title: of the bar.
        rank: this process's; None: there is no other one.
        total: bytes.
        seconds_between: from one drawing of the bar to the next, at least.
    """

    def __init__(
        self,
        option: ProgressOption,
        title: str,
        rank: int | None,
        total: int,
        *,
        seconds_between: float = 0.1,
    ) -> None:
        self._callback: Callable[[Progress], None] | None = None
        self._bar: _Bar | None = None
        if callable(option):
            self._callback = option
        elif option and not rank:
            self._bar = _Bar(title, total, seconds_between)

    @property
    def active(self) -> bool:
        """Whether anybody looks."""
        return self._callback is not None or self._bar is not None

    def update(self, progress: Progress) -> None:
        """Shows the state of things."""
        if self._callback is not None:
            self._callback(progress)
        elif self._bar is not None:
            self._bar.update(progress.bytes_done)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def wants_bar() -> bool:
    """Whether somebody looks at standard error: a bar is for terminals, not for logs."""
    return sys.stderr is not None and sys.stderr.isatty()


class _Bar:
    """One line on standard error: redrawn on a terminal, written once, at the end, elsewhere."""

    def __init__(self, title: str, total: int, seconds_between: float) -> None:
        self._title = printable(title)
        self._total = total
        self._seconds_between = seconds_between
        self._done = 0
        self._begun = time.monotonic()
        self._drawn = -math.inf
        self._redraws = wants_bar()

    def update(self, done: int) -> None:
        self._done = done
        now = time.monotonic()
        if self._redraws and now - self._drawn >= self._seconds_between:
            self._drawn = now
            self._write("")

    def close(self) -> None:
        self._write("\n")

    def _write(self, end: str) -> None:
        seconds = time.monotonic() - self._begun
        share = self._done / self._total if self._total else 1.0
        rate = f", {size(self._done / seconds)}/s" if seconds else ""
        begin, rest = ("\r", "\x1b[K") if self._redraws else ("", "")
        if sys.stderr is None:
            return
        text = f"{self._title}: {share:.0%} of {size(self._total)}{rate}"
        # Whoever reads standard error may have closed it; the save has not failed.
        with suppress(OSError, ValueError):
            print(f"{begin}{text}{rest}", end=end, file=sys.stderr, flush=True)
