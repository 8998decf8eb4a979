"""Progress of a save or a load: a bar on a terminal, or a function of the caller's."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


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
    """Shows the progress of one save or load, as the option says. A context manager."""

    def __init__(self, option: ProgressOption, title: str, rank: int | None, total: int) -> None:
        self._callback: Callable[[Progress], None] | None = None
        self._bar: Any = None
        self._shown = 0
        if callable(option):
            self._callback = option
        elif option and not rank:
            self._bar = _make_bar(title, total)

    @property
    def active(self) -> bool:
        """Whether anybody looks."""
        return self._callback is not None or self._bar is not None

    def update(self, progress: Progress) -> None:
        """Shows the state of things."""
        if self._callback is not None:
            self._callback(progress)
        elif self._bar is not None:
            self._bar.update(progress.bytes_done - self._shown)
            self._shown = progress.bytes_done

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def _make_bar(title: str, total: int) -> Any:
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ImportError:
        raise ValueError(
            "progress=True needs tqdm (pip install 'torch_ckpt[progress]'); "
            "or pass a function of your own"
        ) from None
    return tqdm(total=total, desc=title, unit="B", unit_scale=True, file=sys.stderr, leave=True)
