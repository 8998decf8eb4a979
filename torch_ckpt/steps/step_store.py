"""The interface of step stores: local directories and URLs."""

from __future__ import annotations

import abc
import errno
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from torch_ckpt.checkpoint.marker import STEP_NAME, epoch_of
from torch_ckpt.errors import CheckpointError
from torch_ckpt.options import DEFAULT_READ_OPTIONS, ReadOptions, WriteOptions

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from typing_extensions import Unpack  # in typing since Python 3.11

    from torch_ckpt.checkpoint.opened import Checkpoint
    from torch_ckpt.checkpoint.source import Source
    from torch_ckpt.inspection.verify import VerifyReport
    from torch_ckpt.loading.load import LoadArguments
    from torch_ckpt.loading.report import LoadReport
    from torch_ckpt.saving.target import Target
    from torch_ckpt.steps.lease_protocol import LeaseStore
    from torch_ckpt.steps.local_copy import LocalCopy
    from torch_ckpt.steps.root_lease import ObservedLease, RootLease


@dataclass(frozen=True)
class StepInfo:
    """A step beneath a root, or the remains of an incomplete or deleted step.

    Attributes:
        step: step number, at least 0.
        path: directory or URL of the step.
        state: "complete"; "unfinished" if the step is being saved or its save was interrupted;
            "deleted" if the step is being deleted or its deletion was interrupted.
        saved_at: Unix timestamp of the step's completion; None if unknown.
        bytes: total size of the step's files, in bytes.
        metrics: the metrics passed to the save.
        notes: the notes passed to the save.
        pinned: True if retention keeps the step until it is unpinned.
        epoch: number of the run that saved the step, among the runs of the root; see
            :func:`torch_ckpt.checkpoint.lineage.by_lineage`. A save without a lease
            (:func:`torch_ckpt.training.save_checkpoint`) uses the greatest epoch of the
            root. 0 if the root has no epochs, or version 0.1 saved the step. None if the marker is
            empty or unreadable, for example because a user created the marker.
        run: process of the run that saved the step; empty if unknown.

    Example::

        for info in open_steps("checkpoints").entries(leftovers=False):
            print(info.step, info.path, info.metrics)
    """

    step: int
    path: str
    state: str
    saved_at: float | None = None
    bytes: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    pinned: bool = False
    epoch: int | None = None
    run: str = ""

    @property
    def complete(self) -> bool:
        """True if the step can be loaded."""
        return self.state == "complete"

    @property
    def lacks_marker(self) -> bool:
        """True if the directory has a step's name and lacks only the marker."""
        return self.state == "unfinished" and STEP_NAME.match(self.name) is not None

    @property
    def name(self) -> str:
        """Name of the directory beneath the root."""
        return self.path.rstrip("/").rpartition("/")[2]


class StepStore(abc.ABC):
    """The steps of a run beneath a root. Created by :func:`torch_ckpt.steps.open_steps`.

    Any rank can list and load steps. Only one process at a time is allowed to sweep and delete.

    Args:
        root: a directory or URL. The root need not exist before the first save.
        storage_options: see :class:`torch_ckpt.WriteOptions`.

    Attributes:
        lease: the lease on which saves, deletions and sweeps depend. If it is lost, they fail with
            :class:`torch_ckpt.RootInUse` and change nothing. None: they depend on no lease.

    Example::

        steps = open_steps("checkpoints")
        for info in steps.entries():
            print(info.step, info.state, info.bytes)
        steps.load(100, {"model": model})
    """

    #: True if a sweep may remove directories without a marker. Beneath a URL, an unfinished save
    #: already has its step's name; a local directory gets that name only when it is complete.
    sweeps_what_lacks_markers = False

    def __init__(self, root: str, storage_options: Mapping[str, Any] | None = None) -> None:
        self.root = root
        self.lease: RootLease | ObservedLease | None = None
        self._storage_options = storage_options

    @abc.abstractmethod
    def lease_store(self) -> LeaseStore:
        """Returns the store of the root's lease (steps/root_lease.py)."""

    @abc.abstractmethod
    def require_root(self, *, read_only: bool) -> None:
        """Checks that the root is not a local file or a single checkpoint, which has no steps.
        Beneath a URL, also checks that the credentials permit the requests, and warns if the server
        ignores conditions.

        Args:
            read_only: nothing will be written beneath the root.

        Raises:
            NotADirectoryError: the root is a file.
            CheckpointError: the root is a single checkpoint. If it is a step, the message names the
                root of the step.
            OSError: a request fails or is not permitted.
        """

    @abc.abstractmethod
    def newest_epoch(self) -> int:
        """Returns the greatest epoch of the runs that have used the root; 0 if there is none.

        Raises:
            OSError: the root cannot be listed.
        """

    def run_marker(self) -> dict[str, Any]:
        """Returns the part of a step's marker that identifies the run. A save without a lease
        continues the newest run: with a smaller epoch, its step would count as abandoned."""
        marker = {} if self.lease is None else self.lease.marker()
        if marker:
            return marker
        epoch = self.newest_epoch()
        return {"epoch": epoch} if epoch else {}

    @abc.abstractmethod
    def entries(self, *, leftovers: bool = True) -> list[StepInfo]:
        """Lists the steps, sorted by step number. The list is empty if the root does not exist.

        Args:
            leftovers: also list unfinished and deleted steps, and read the sizes of their files.

        Raises:
            OSError: the root cannot be listed.
        """

    def copies(self, suspects: Collection[int] = ()) -> list[LocalCopy]:
        """Lists the steps on the disk of this host; none without a local tier (tier.py)."""
        return []

    @abc.abstractmethod
    def sweep(self, *, deleted_only: bool = False, attempt: str = "") -> list[str]:
        """Removes the leftovers of interrupted saves and deletions.

        If a leftover cannot be removed, the error is logged, and the next sweep tries again.

        Args:
            deleted_only: only finish interrupted deletions. Unfinished steps are kept, because a
                running save might own them.
            attempt: the 8 hex digits of this run (see :meth:`target`). Unfinished steps of this run
                are kept.

        Returns:
            The names of the removed leftovers.

        Raises:
            OSError: the root cannot be listed.
        """

    @abc.abstractmethod
    def target(
        self,
        step: int,
        options: WriteOptions,
        *,
        attempt: str,
        may_replace: bool = False,
        marker: Callable[[], dict[str, Any]] = dict,
        make_room: Callable[[], None] = lambda: None,
    ) -> Target:
        """Creates the target for one save of a step. The target's commit completes the step.

        Args:
            step: step number, 0 to 9,999,999,999.
            options: the options of the save.
            attempt: 8 hex digits, the same on all ranks and different for each run.
            may_replace: True allows a complete step to be replaced. The existing step is kept until
                the commit.
            marker: function that returns the content of the marker, a dict of JSON values. Called
                on the coordinator during the commit.
            make_room: function that frees disk space, called if the tensors of the state do not fit
                into the free space. If they do not fit even afterwards, the save is refused.

        Raises:
            ValueError: the step number is out of range.

        Raises (from the save, on every rank, inside a ``CheckpointException``):
            FileExistsError: the step is complete, and ``may_replace`` is False.
            OSError: the tensors do not fit into the free space (``ENOSPC``), or a system call
                failed.
        """

    def load(
        self,
        step: int,
        state_dict: dict[str, Any],
        options: ReadOptions = DEFAULT_READ_OPTIONS,
        **arguments: Unpack[LoadArguments],
    ) -> LoadReport | Checkpoint:
        """Loads a step, as :func:`torch_ckpt.load` does. All ranks must call this method.

        Args:
            step: step number.
            state_dict, options, arguments: passed to :func:`torch_ckpt.load`.

        Returns, raises: see :func:`torch_ckpt.load`.
        """
        from torch_ckpt.loading.load import load

        return load(state_dict, partial(self._source_of, step, options), **arguments)

    def metadata(self, step: int) -> Metadata:
        """Reads the metadata of a step: the names, shapes, dtypes and locations of the step's
        values.

        Raises:
            FileNotFoundError, Corrupt, Unsafe: the step does not exist or cannot be read.
        """
        with closing(self._source_of(step, DEFAULT_READ_OPTIONS)) as source:
            source.open()
            return source.metadata()

    def verify(self, step: int) -> VerifyReport:
        """Reads and checks all files of a step, as :func:`torch_ckpt.verify` does."""
        from torch_ckpt.inspection.verify import verify

        return verify(self.path_of(step), storage_options=self._storage_options)

    @abc.abstractmethod
    def delete(self, step: int) -> bool:
        """Deletes a step. Succeeds even if the step does not exist.

        Returns:
            False if a process is saving or loading the step. The step is then unchanged; try again
            later.

        Raises:
            OSError: the step cannot be deleted.
        """

    @abc.abstractmethod
    def contents(self, name: str) -> tuple[int, int]:
        """Returns the number and total size of the files in a directory that :meth:`entries` lists.
        Both are 0 if the directory no longer exists."""

    @abc.abstractmethod
    def is_complete(self, step: int) -> bool:
        """True if a step exists and is complete. Reads only the step's own directory.

        Raises:
            ValueError: the step number is out of range.
            OSError: the step's files cannot be listed.
        """

    @abc.abstractmethod
    def marker_of(self, step: int) -> dict[str, Any] | None:
        """Reads the marker of a step; None if the step is not complete. Reads only the step's own
        directory. See :func:`torch_ckpt.checkpoint.marker.read_marker`."""

    @abc.abstractmethod
    def is_pinned(self, step: int) -> bool:
        """True if a step exists and is pinned.

        Raises:
            OSError: the step's files cannot be listed.
        """

    def set_pinned(self, step: int, pinned: bool) -> None:
        """Pins or unpins a step. Retention keeps pinned steps.

        Raises:
            FileNotFoundError: there is no such complete step.
        """
        if not self.is_complete(step):
            action = "pinned" if pinned else "unpinned"
            raise FileNotFoundError(
                errno.ENOENT,
                f"step {step} cannot be {action}: it is not complete",
                self.path_of(step),
            )
        self._set_pinned(step, pinned)

    @abc.abstractmethod
    def path_of(self, step: int) -> str:
        """Returns the directory or URL of a complete step."""

    @abc.abstractmethod
    def _set_pinned(self, step: int, pinned: bool) -> None: ...

    def _source_of(self, step: int, options: ReadOptions) -> Source:
        from torch_ckpt.checkpoint.source import Source

        return Source(self.path_of(step), self._with_storage(options))

    def _with_storage(self, options: ReadOptions) -> ReadOptions:
        if self._storage_options is None:
            return options
        return replace(options, storage_options=self._storage_options)


def refuse_checkpoint(root: str) -> NoReturn:
    """Raises the error for a root that is a single checkpoint."""
    parent, _, name = root.rpartition("/")
    advice = parent if STEP_NAME.match(name) else "the directory that contains the steps"
    raise CheckpointError(
        f"{root} is a single checkpoint, not the root of a run. Pass {advice}, or a new "
        "directory. To start a run from this checkpoint, load it with torch_ckpt.load(state, "
        f"path) if restore() returns 0. To list it, run torch-ckpt ls {root}."
    )


def refuse_complete_step(path: str) -> NoReturn:
    """Raises the error for a save of a step that must not be replaced."""
    raise FileExistsError(
        errno.EEXIST,
        "the step already exists and is complete. Pass overwrite=True to replace it. A manager "
        "also replaces it after it has restored an earlier step",
        path,
    )


def info_of(
    step: int, path: str, marker: dict[str, Any], pinned: bool, bytes_of: Callable[[], int]
) -> StepInfo:
    """Builds the StepInfo of a complete step. Ignores fields of the marker with unexpected types.

    Args:
        bytes_of: computes the size of the step if the marker lacks it.
    """
    saved_at, total = marker.get("saved_at"), marker.get("bytes")
    metrics, notes, run = marker.get("metrics"), marker.get("notes"), marker.get("run")
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
        epoch_of(marker),
        run if isinstance(run, str) else "",
    )


def _number(value: object, wanted: Callable[[float], bool] = lambda _: True) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        # The JSON has an integer that is too large for a float.
        return None
    return number if wanted(number) else None
