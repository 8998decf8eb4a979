"""What the steps of a run are, wherever they lie."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from torch_ckpt.checkpoint.step_names import STEP_NAME
from torch_ckpt.inspection.verify import VerifyReport
from torch_ckpt.loading.report import LoadReport
from torch_ckpt.saving.writer import FileSystemWriter


@dataclass(frozen=True)
class StepInfo:
    """One step beneath a root, or a leftover of one.

    Attributes:
        step: its number, at least 0.
        path: its directory or URL.
        state: "complete"; "unfinished" for one that is being saved, or was when its ranks died;
            "deleted" for one whose deletion was not ended.
        saved_at: when it was completed, in seconds since 1970; None where unknown.
        bytes: of its files.
        metrics: as given when it was saved.
        notes: likewise.
        pinned: whether retention leaves it alone.
    """

    step: int
    path: str
    state: str
    saved_at: float | None = None
    bytes: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    pinned: bool = False

    @property
    def complete(self) -> bool:
        """Whether it can be loaded."""
        return self.state == "complete"

    @property
    def lacks_marker(self) -> bool:
        """Whether only the marker tells it from a step: it has a step's name, and is none."""
        return self.state == "unfinished" and STEP_NAME.match(self.name) is not None

    @property
    def name(self) -> str:
        """Of its directory, beneath the root."""
        return self.path.rstrip("/").rpartition("/")[2]


class StepStore(abc.ABC):
    """Where the steps of a run are. Any rank may list and load; one at a time deletes and sweeps.

    Args:
        root: a directory or URL. It need not exist before the first save.
    """

    #: Whether a sweep may remove what lacks a marker: beneath URLs a save has its step's name from
    #: the start, elsewhere nothing of ours is so.
    sweeps_what_lacks_markers = False

    def __init__(self, root: str) -> None:
        self.root = root

    @property
    def lease_root(self) -> str | None:
        """The directory of the lease of who writes here (lease.py); None where there is none."""
        return None

    @abc.abstractmethod
    def entries(self, *, leftovers: bool = True) -> list[StepInfo]:
        """What is there, by step; nothing where there is no root.

        Args:
            leftovers: also what is not complete, whose files are looked at for their bytes.

        Raises:
            OSError: the root cannot be listed.
        """

    @abc.abstractmethod
    def sweep(self, *, deleted_only: bool = False, attempt: str = "") -> list[str]:
        """Ends what crashes have interrupted; the names of the leftovers that went.

        What cannot be removed is logged, and tried again the next time.

        Args:
            deleted_only: leave alone what may be a save under way.
            attempt: of this run, whose ranks may have begun to save.

        Raises:
            OSError: the root cannot be listed.
        """

    @abc.abstractmethod
    def writer(
        self,
        step: int,
        *,
        attempt: str,
        overwrite: bool = False,
        marker: Callable[[], dict[str, Any]] = dict,
        expected_bytes: int = 0,
        make_room: Callable[[], None] | None = None,
        **options: Any,
    ) -> FileSystemWriter:
        """The writer for one save of a step, which makes it complete at its commit.

        Args:
            step: 0 to 9,999,999,999.
            attempt: 8 hex digits, the same on all ranks, and another one in each run.
            overwrite: whether a complete step may be replaced; it stays until the commit.
            marker: gives, on the coordinator at the commit, what the marker is to say: JSON.
            expected_bytes: that all ranks will write together, at least.
            make_room: called where less is free, before the save is refused.
            options: passed to :class:`FileSystemWriter`.

        Raises:
            ValueError: there can be no such step.

        Raises (from the save, on every rank, inside a ``CheckpointException``):
            FileExistsError: the step is complete, and ``overwrite`` is False.
            OSError: ``ENOSPC``, and less is free than expected; or another call failed.
        """

    @abc.abstractmethod
    def load(self, step: int, state_dict: dict[str, Any], **options: Any) -> LoadReport | None:
        """Loads a step, as :func:`torch_ckpt.load`; all ranks call it.

        Args:
            options: passed to :func:`torch_ckpt.load`.
        """

    @abc.abstractmethod
    def metadata(self, step: int) -> Metadata:
        """Names, shapes, dtypes and places of all that a step holds.

        Raises:
            FileNotFoundError, Corrupt, Unsafe: there is none, or it cannot be read.
        """

    @abc.abstractmethod
    def verify(self, step: int) -> VerifyReport:
        """Reads and checks all of a step, as :func:`torch_ckpt.verify`."""

    @abc.abstractmethod
    def delete(self, step: int) -> bool:
        """Deletes a step; one that is not there is no error.

        Returns:
            False where somebody saves or loads there: nothing has happened, try again later.

        Raises:
            OSError: it cannot be deleted.
        """

    @abc.abstractmethod
    def contents(self, name: str) -> tuple[int, int]:
        """How many files, and bytes, a directory of :meth:`entries` holds; zeros of one that is not
        there."""

    @abc.abstractmethod
    def is_complete(self, step: int) -> bool:
        """Whether a step is there and complete now, by its own files alone.

        Raises:
            ValueError: there can be no such step.
            OSError: its files cannot be listed.
        """

    @abc.abstractmethod
    def is_pinned(self, step: int) -> bool:
        """Whether a step is there and pinned now.

        Raises:
            OSError: its files cannot be listed.
        """

    @abc.abstractmethod
    def set_pinned(self, step: int, pinned: bool) -> None:
        """Has retention leave a step alone, or not any more.

        Raises:
            FileNotFoundError: there is no such complete step.
        """


def info_of(
    step: int, path: str, marker: dict[str, Any], pinned: bool, bytes_of: Callable[[], int]
) -> StepInfo:
    """A complete step, by its marker, whose fields may be of any type.

    Args:
        bytes_of: where the marker does not say.
    """
    saved_at, total = marker.get("saved_at"), marker.get("bytes")
    metrics, notes = marker.get("metrics"), marker.get("notes")
    numbers = metrics.items() if isinstance(metrics, dict) else ()
    return StepInfo(
        step,
        path,
        "complete",
        _number(saved_at, math.isfinite),
        total if type(total) is int and total >= 0 else bytes_of(),
        {name: number for name, value in numbers if (number := _number(value)) is not None},
        notes if isinstance(notes, dict) else {},
        pinned,
    )


def _number(value: object, wanted: Callable[[float], bool] = lambda _: True) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        # JSON's integers have no bound.
        return None
    return number if wanted(number) else None
