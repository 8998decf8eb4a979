"""The steps of a run: a directory of ten digits for each, beneath a root.

A crash at any point leaves each step either complete or not there, and a leftover that says so by
its name.

1. Step 100 is written into ``0000000100.tmp-{attempt}``, as any checkpoint (saving.py,
   generations.py). The attempt is 8 hex digits that the ranks of a run have agreed on, so that
   nothing that is left of an earlier run, or still runs, is in the way.
2. When the files of all ranks are durable and the metadata is committed, the coordinator writes
   ``write_completed`` beside them: a JSON document of what the step is. The file is fsynced, then
   the directory.
3. It renames the directory to ``0000000100`` and fsyncs the root. Only now is the save committed,
   on every rank. A step that is replaced is renamed as in 5 just before.
4. A step is complete if its name is ten digits and the marker is in it. Who lists the root sees
   nothing else as a step.
5. A deletion needs the directory for itself (directory.py), so no step goes that is being loaded.
   It is renamed to ``0000000100.deleted-{8 hex digits}``, the root fsynced, then its files go: a
   power cut brings back all of it or nothing.
6. A directory of ten digits without the marker is of no save of a manager: somebody has put it
   there, and it stays until that step is saved.
7. At start the sweep ends what a crash has interrupted: a directory with the marker whose rename in
   3 was not reached, and whose step is not there, gets its name; other leftovers go. None does
   while somebody works in it.
"""

from __future__ import annotations

import abc
import errno
import functools
import json
import math
import operator
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from torch_ckpt import _C
from torch_ckpt.directory import OpenDirectory
from torch_ckpt.errors import DurabilityUncertain, NotCommitted
from torch_ckpt.free_space import require_room
from torch_ckpt.loading import LoadReport
from torch_ckpt.metrics import LOGGER
from torch_ckpt.reader import FileSystemReader
from torch_ckpt.text import size
from torch_ckpt.verifying import VerifyReport, verify
from torch_ckpt.writer import FileSystemWriter

MARKER_NAME = "write_completed"
PINNED_NAME = "pinned"
LARGEST_STEP = 10**10 - 1

STEP_NAME = re.compile(r"^(\d{10})$", re.ASCII)
_LEFTOVER = re.compile(r"^(\d{10})\.(tmp|deleted)-[0-9a-f]{8}$", re.ASCII)
#: More is no marker of ours.
MOST_MARKER_BYTES = 16 << 20


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


def open_steps(
    root: str | os.PathLike[str], *, staging_dir: str | os.PathLike[str] | None = None
) -> StepStore:
    """The steps beneath a root.

    Args:
        root: a local directory, or a URL that fsspec knows.
        staging_dir: local directory for what is on its way to or from a remote root; a temporary
            one if None.

    Raises:
        ImportError: the URL's file system is in a package that is not installed; says which.
        ValueError: ``staging_dir`` is given for a local root, or fsspec does not know the URL's
            protocol.
    """
    path = os.fspath(root)
    scheme, separator, rest = path.partition("://")
    if separator and scheme not in ("file", "local"):
        from torch_ckpt.remote import RemoteSteps

        remote: StepStore = RemoteSteps(path, staging_dir)
        return remote
    if staging_dir is not None:
        raise ValueError(f"staging_dir is for remote roots, and {path} is a local one")
    return LocalSteps(rest if separator else path)


def step_name(step: int) -> str:
    """The name of a step's directory.

    Raises:
        TypeError: it is no integer.
        ValueError: it has no ten digits.
    """
    try:
        number = operator.index(step)
    except TypeError:
        raise TypeError(f"a step must be an int, got {step!r}") from None
    if not 0 <= number <= LARGEST_STEP:
        raise ValueError(f"a step must be from 0 to {LARGEST_STEP}, got {number}")
    return f"{number:010d}"


class LocalSteps(StepStore):
    """The steps beneath a local directory.

    Args:
        patience: seconds that files of other ranks may take to be seen.
    """

    def __init__(self, root: str | os.PathLike[str], *, patience: float = 30.0) -> None:
        super().__init__(os.path.abspath(root))
        self.patience = patience
        self._saved_in: tuple[int, ...] | None = None

    def saved_in(self, root: OpenDirectory) -> None:
        """From now on nothing is removed where the path leads to another root."""
        self._saved_in = root.identity()

    @property
    def lease_root(self) -> str:
        return self.root

    def path_of(self, step: int) -> str:
        """The directory of a complete step."""
        return os.path.join(self.root, step_name(step))

    def entries(self, *, leftovers: bool = True) -> list[StepInfo]:
        try:
            names = os.listdir(self.root)
        except FileNotFoundError:
            return []
        found = [self._info(name) for name in sorted(names) if leftovers or STEP_NAME.match(name)]
        return [info for info in found if info is not None and (leftovers or info.complete)]

    def sweep(self, *, deleted_only: bool = False, attempt: str = "") -> list[str]:
        try:
            names = sorted(os.listdir(self.root))
        except FileNotFoundError:
            return []
        gone = []
        for name in names:
            if deleted_only and ".deleted-" not in name:
                continue
            # Between the making of a directory and the claim nobody works in it.
            if attempt and name.endswith(f".tmp-{attempt}"):
                continue
            try:
                if self._sweep(name):
                    gone.append(name)
            except OSError as error:
                # The others still may go.
                LOGGER.warning("a leftover could not be removed, and is tried again: %s", error)
        return gone

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
        return _StepWriter(
            self,
            step,
            attempt,
            overwrite,
            marker,
            expected_bytes,
            make_room or (lambda: None),
            options,
        )

    def load(self, step: int, state_dict: dict[str, Any], **options: Any) -> LoadReport | None:
        from torch_ckpt.api import load

        return load(state_dict, self.path_of(step), **options)

    def metadata(self, step: int) -> Metadata:
        return FileSystemReader(self.path_of(step)).read_metadata()

    def verify(self, step: int) -> VerifyReport:
        return verify(self.path_of(step))

    def delete(self, step: int) -> bool:
        with suppress(FileNotFoundError):
            return self.remove(step_name(step))
        return True

    def contents(self, name: str) -> tuple[int, int]:
        files = total = 0
        for directory, _, names in os.walk(os.path.join(self.root, name)):
            for file in names:
                # A load or a save beside us may be removing it.
                with suppress(FileNotFoundError):
                    total += os.lstat(os.path.join(directory, file)).st_size
                    files += 1
        return files, total

    def is_complete(self, step: int) -> bool:
        return os.path.lexists(os.path.join(self.path_of(step), MARKER_NAME))

    def is_pinned(self, step: int) -> bool:
        return os.path.lexists(os.path.join(self.path_of(step), PINNED_NAME))

    def set_pinned(self, step: int, pinned: bool) -> None:
        path = self.path_of(step)
        if not self.is_complete(step):
            raise FileNotFoundError(2, "there is no complete step to pin", path)
        if pinned:
            with closing(OpenDirectory(path)) as opened:
                pin(opened)
            return
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(path, PINNED_NAME))
        _C.sync_directory(path)

    def remove(self, name: str) -> bool:
        """Removes a directory beneath the root, unless somebody works in it.

        Returns:
            Whether it has gone.

        Raises:
            OSError: it is not there, or cannot be removed; or the last save went to another root.
        """
        path = os.path.join(self.root, name)
        with closing(OpenDirectory(self.root)) as root, closing(OpenDirectory(path)) as opened:
            if self._saved_in not in (None, root.identity()):
                raise OSError(
                    errno.ESTALE,
                    "the path leads to another directory than at the last save, so nothing is "
                    "removed there",
                    self.root,
                )
            if not opened.take_alone():
                return False
            if ".deleted-" not in name:
                aside = put_aside(root, name)
                if not is_named(opened, root, aside):
                    # A save has named its step so since it was opened; that one is not alone here.
                    root.rename(aside, name)
                    return False
                root.sync()
                path = os.path.join(self.root, aside)
            if os.path.islink(path):
                # To a disk of somebody's choice; what is there is not ours to remove.
                os.unlink(path)
            else:
                _C.fault_point("rmtree", path)
                shutil.rmtree(path)
        return True

    # --- private ---------------------------------------------------------------------------------

    def _info(self, name: str) -> StepInfo | None:
        match = STEP_NAME.match(name) or _LEFTOVER.match(name)
        path = os.path.join(self.root, name)
        if match is None or not os.path.isdir(path):
            return None
        step = int(match.group(1))
        marker = read_marker(path) if STEP_NAME.match(name) else None
        try:
            if marker is None:
                state = "deleted" if ".deleted-" in name else "unfinished"
                _C.fault_point("scandir", path)
                return StepInfo(step, path, state, bytes=bytes_in(path))
            return info_of(step, path, marker, self.is_pinned(step), lambda: bytes_in(path))
        except FileNotFoundError:
            # Deleted meanwhile.
            return None

    def _sweep(self, name: str) -> bool:
        """Whether it was a leftover, and has gone."""
        match = _LEFTOVER.match(name)
        if match is None:
            return False
        path = os.path.join(self.root, name)
        if not os.path.isdir(path):
            return False
        # Another sweep may be at it.
        with suppress(FileNotFoundError):
            if match.group(2) == "tmp":
                final = match.group(1)
                with closing(OpenDirectory(path)) as opened:
                    if not opened.take_alone():
                        return False
                    if MARKER_NAME in opened.names() and not self._is_there(final):
                        os.rename(path, os.path.join(self.root, final))
                        _C.sync_directory(self.root)
                        return False
            return self.remove(name)
        return False

    def _is_there(self, name: str) -> bool:
        return os.path.lexists(os.path.join(self.root, name))


class _StepWriter(FileSystemWriter):
    """Writes one step, and names it when it is complete."""

    reported_elsewhere = True

    def __init__(
        self,
        steps: LocalSteps,
        step: int,
        attempt: str,
        overwrite: bool,
        marker: Callable[[], dict[str, Any]],
        expected_bytes: int,
        make_room: Callable[[], None],
        options: dict[str, Any],
    ) -> None:
        self._steps = steps
        self._step = step_name(step)
        self._final = os.path.join(steps.root, self._step)
        self._may_replace = overwrite
        self._marker = marker
        self._expected_bytes = expected_bytes
        self._make_room = make_room
        self._tidies = False
        self._works = False
        super().__init__(f"{self._final}.tmp-{attempt}", **options)

    @property
    def identity(self) -> str | None:
        return str(self.path)

    @property
    def destination(self) -> str:
        return self._final

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self._final, save_id=self.save_id)

    def set_up_for_save(self, rank: int) -> None:
        try:
            if rank == 0:
                self._refuse_if_there()
                _C.make_directories(self._steps.root)
                require_room(
                    self._steps.root,
                    self._expected_bytes,
                    f"the step takes at least {size(self._expected_bytes)}",
                    "keep fewer steps, or make room",
                    self._make_room,
                )
            super().set_up_for_save(rank)
            if rank == 0:
                # Of a save of this run that was complete and could not be named.
                self.directory.remove(MARKER_NAME)
        finally:
            # Not before, when another rank may be making the directory.
            self._tidies = rank == 0

    def commit(self, data: bytes, files: set[str]) -> None:
        # The claim ends with the metadata; no sweep may come between that and the name.
        with (
            closing(self.directory.reopen()) as opened,
            closing(OpenDirectory(self._steps.root)) as root,
        ):
            opened.share()
            replaced = self._name(opened, root, data, files)
            self._steps.saved_in(root)
            if self.sync_files:
                try:
                    root.sync()
                except OSError as error:
                    raise DurabilityUncertain(
                        f"{self._final}: {error}", error.errno or 0
                    ) from error
        if replaced is not None:
            # Who loads it keeps it until the next sweep; and the save has not failed.
            with suppress(OSError), self._working():
                self._steps.remove(replaced)

    def abandon(self) -> None:
        super().abandon()
        if self._tidies:
            # Of a save that has failed its files have gone; others' may still be there.
            with suppress(OSError):
                os.rmdir(self.path)

    def bytes_moved(self) -> int:
        return super().bytes_moved() + (time.monotonic_ns() if self._works else 0)

    @contextmanager
    def _working(self) -> Iterator[None]:
        """A block that may take long, in which nothing is moved; it ends by itself."""
        self._works = True
        try:
            yield
        finally:
            self._works = False

    def _name(
        self, opened: OpenDirectory, root: OpenDirectory, data: bytes, files: set[str]
    ) -> str | None:
        """Makes the step complete; the name of what it has replaced."""
        attempt = os.path.basename(self.path)
        replaced = None
        try:
            with self._working():
                self._refuse_if_missing(opened, files)
            super().commit(data, files)
            self._mark(opened)
            self._refuse_if_there()
            if not (opened.is_at_path() and root.is_at_path()):
                raise self._moved()
            if os.path.lexists(self._final):
                if os.path.lexists(os.path.join(self._final, PINNED_NAME)):
                    pin(opened)
                replaced = put_aside(root, self._step)
            root.rename(attempt, self._step)
            if not is_named(opened, root, self._step):
                # What has come to the attempt's place is somebody else's.
                root.rename(self._step, attempt)
                raise self._moved()
        except BaseException as error:
            if replaced is not None:
                try:
                    root.rename(replaced, self._step)
                except OSError as other:
                    raise NotCommitted(
                        f"{self._final}: {error}; the step is complete in {self.path}, and the "
                        "next sweep names it"
                    ) from other
            with suppress(OSError):
                self._discard(opened, root)
            if isinstance(error, FileExistsError):
                raise
            # Metadata that may not last is no step either.
            if isinstance(error, OSError | DurabilityUncertain):
                raise NotCommitted(f"{self._final}: {error}", error.errno or 0) from error
            raise
        return replaced

    def _moved(self) -> NotCommitted:
        return NotCommitted(
            f"{self.path}: somebody has renamed this directory, or one above it, while the step "
            "was being saved there; save it again"
        )

    def _discard(self, opened: OpenDirectory, root: OpenDirectory) -> None:
        """Removes what the save has written, wherever its directory is now."""
        if not opened.take_alone():
            return
        # The marker first: without it the next sweep removes the rest.
        for name in sorted(opened.names(), key=lambda name: name != MARKER_NAME):
            opened.remove(name)
        attempt = os.path.basename(self.path)
        if is_named(opened, root, attempt):
            os.rmdir(attempt, dir_fd=root.fd)

    def _mark(self, opened: OpenDirectory) -> None:
        said = {"step": int(self._step), "saved_at": time.time(), "bytes": bytes_in(opened.fd)}
        write_marker(opened, {**said, **self._marker()}, self.sync_files)

    def _refuse_if_missing(self, opened: OpenDirectory, files: set[str]) -> None:
        """Other ranks' files are here, or their directory is another one."""
        missing = files - set(opened.names())
        until = time.monotonic() + self._steps.patience
        while missing:
            # Network file systems remember for some time what was not there.
            missing -= set(opened.names())
            if missing and time.monotonic() >= until:
                raise NotCommitted(
                    f"{self._final}: what other ranks have written is not here ("
                    f"{', '.join(sorted(missing)[:3])}): all ranks must see the same directory"
                )
            if missing:
                time.sleep(0.1)

    def _refuse_if_there(self) -> None:
        if os.path.lexists(self._final) and not os.path.isdir(self._final):
            # Nobody knows whose it is, and a step that takes its name would have to remove it.
            raise FileExistsError(
                errno.EEXIST, "this has a step's name and is not a directory: move it", self._final
            )
        if not self._may_replace and read_marker(self._final) is not None:
            raise FileExistsError(
                17,
                "the step is there and complete, and is not one that training has come back to: "
                "restore() first, or delete it, or use another root",
                self._final,
            )


# --- markers -------------------------------------------------------------------------------------


def read_marker(directory: str) -> dict[str, Any] | None:
    """What a step's marker says; None where there is none.

    The marker's being there is what counts. One that cannot be understood, as an empty one of
    another program, says nothing.
    """
    try:
        with open(os.path.join(directory, MARKER_NAME), "rb") as file:
            return parsed_marker(file.read(MOST_MARKER_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        # It is there; whether the step can be read, loading it tells.
        return {}


def parsed_marker(data: bytes) -> dict[str, Any]:
    """The document in a marker; empty where there is none."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def encoded_marker(document: dict[str, Any]) -> bytes:
    """A marker's bytes.

    Raises:
        TypeError, ValueError: something in it is nothing that JSON knows, or it is too long.
    """
    data = json.dumps(document, indent=1, sort_keys=True).encode()
    if len(data) > MOST_MARKER_BYTES:
        raise ValueError(
            f"metrics and notes take {size(len(data))} as JSON; at most "
            f"{size(MOST_MARKER_BYTES)} are read again: save the rest as a part of the state"
        )
    return data


def write_marker(directory: OpenDirectory, document: dict[str, Any], sync: bool) -> None:
    """Writes the marker, durably if wanted."""
    opener = functools.partial(os.open, mode=0o666, dir_fd=directory.fd)
    # By a rename: an empty one would be a step's that has no metrics.
    with open(f"{MARKER_NAME}.tmp", "wb", opener=opener) as file:
        file.write(encoded_marker(document))
        file.flush()
        if sync:
            _C.fault_point("fsync", os.path.join(directory.path, file.name))
            os.fsync(file.fileno())
    directory.rename(f"{MARKER_NAME}.tmp", MARKER_NAME)
    if sync:
        directory.sync()


def pin(directory: OpenDirectory) -> None:
    """Has retention leave a step alone, durably."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
    os.close(os.open(PINNED_NAME, flags, 0o666, dir_fd=directory.fd))
    directory.sync()


def put_aside(root: OpenDirectory, name: str) -> str:
    """Renames a step's directory to what is not a step; returns its new name."""
    aside = f"{name[:10]}.deleted-{uuid.uuid4().hex[:8]}"
    root.rename(name, aside)
    return aside


def is_named(opened: OpenDirectory, root: OpenDirectory, name: str) -> bool:
    """Whether a name beneath a root is that of an open directory."""
    try:
        return os.path.samestat(os.stat(name, dir_fd=root.fd), os.fstat(opened.fd))
    except FileNotFoundError:
        return False


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


def bytes_in(directory: str | int) -> int:
    """Of all files of a checkpoint's directory, by its path or its descriptor."""
    total = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                total += entry.stat(follow_symlinks=False).st_size
    return total
