"""Which files of a checkpoint's directory belong to what, and which may go.

A directory may hold a committed checkpoint, left-overs of saves that died, and the files of saves
that are under way. These rules keep them apart, and nothing else in the package removes a data file
that it has not made itself:

1. A save claims the directory before it writes and until it has ended. Where its names might be
   taken, by what is there or by another save, they get a tag that nobody else has.
2. A file that any metadata in the directory names is never removed. Metadata that cannot be read
   may name any file, so then nothing is.
3. Nothing is removed while somebody else saves or loads there (directory.py), nor before the
   directory is durable: the rename of the metadata that counts may not be.
4. What a save has committed may have been replaced by the time it has the directory alone, so what
   counts is the metadata that is there then.
5. A save whose claim has ended, and whose files may have gone, commits nothing.
"""

from __future__ import annotations

import os
import re
import threading
import uuid
import weakref
from collections.abc import Collection, Iterable
from contextlib import closing
from typing import ClassVar, NamedTuple

from torch_ckpt._base.log import warn
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.metadata import METADATA_NAME, metadata_bytes_in, read_metadata_in
from torch_ckpt.errors import CheckpointError, NotCommitted

# "__3_0.distcp", "__3_5f0c19ab_0.distcp": rank, generation tag where there is one, bucket. A
# separation hint may stand before it.
_DATA_FILE = re.compile(r"__(\d+)_(?:[0-9a-f]{8}_)?\d+\.distcp$")
_METADATA_FILE = re.compile(rf"^(?:__(\d+))?{re.escape(METADATA_NAME)}$")
_PREFIX = re.compile(r"^__(\d+)_(?:[0-9a-f]{8}_)?$")
_TEMPORARY = re.compile(rf"^(?:__(\d+))?{re.escape(METADATA_NAME)}\.tmp(?:-[0-9a-f]{{32}})?$")
_KNOWN_FILE = re.compile("|".join(p.pattern for p in (_DATA_FILE, _METADATA_FILE)))

#: How long a save waits for a process that removes files, which takes seconds where they are large.
PATIENCE_SECONDS = 60.0


class _Commit(NamedTuple):
    """What a save has published: its metadata, and the data files that this names."""

    metadata: bytes
    files: set[str]


def metadata_name(rank: int | None) -> str:
    """The metadata's file name; of one rank's own where ranks save without collectives."""
    return METADATA_NAME if rank is None else f"__{rank}{METADATA_NAME}"


class Claim:
    """A save's part in a directory: of the coordinator, or of each rank where ranks save alone.

    Other ranks have one, too, as long as the coordinator's may be another save's.

    Dropped without a commit it is that of a save that failed, whose files then go, whichever rank
    wrote them. So it is when the thread that made it makes another one for the directory: who keeps
    an exception may keep the first one, too.

    Args:
        directory: of the checkpoint. The claim has a descriptor of its own.
        rank: whose metadata it will be; None: that of all ranks.
        ends_earlier: False where the thread's saves into the directory may be under way together,
            and it neither ends others nor is ended.
        patience: seconds to wait for somebody who has the directory alone.

    Attributes:
        tag: what goes behind the rank in the names of the save's data files; may be empty.

    Raises:
        OSError: the directory cannot be opened or listed.
        CheckpointError: another process does not end to remove files there.
    """

    # By thread and directory.
    _last: ClassVar[weakref.WeakValueDictionary[tuple[int, ...], Claim]] = (
        weakref.WeakValueDictionary()
    )

    def __init__(
        self,
        directory: OpenDirectory,
        rank: int | None,
        ends_earlier: bool = True,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        opened = directory.reopen()
        try:
            place = threading.get_ident(), *opened.identity()
            other = self._last.get(place)
            if other is not None and ends_earlier:
                other.abandon()
            # Of two that begin at the same time one is alone.
            is_alone = opened.try_lock_exclusive()
            is_empty = not any(map(_KNOWN_FILE.search, opened.names()))
            if not opened.share(patience):
                # Going on without a share, this save's files could be removed before its commit.
                raise CheckpointError(
                    f"{opened.path}: another process has had the directory for itself for "
                    f"{patience:g} s, to remove files that no metadata names; look whether "
                    "it is stopped (/proc/locks has its number), and save again"
                )
        except BaseException:
            # Who keeps the error keeps this frame.
            opened.close()
            raise
        self.tag = "" if is_alone and is_empty else f"{uuid.uuid4().hex[:8]}_"
        self._opened = opened
        self._rank = rank
        self._abandon: weakref.finalize[[OpenDirectory, int | None, int], Claim] = weakref.finalize(
            self, _abandon, opened, rank, os.getpid()
        )
        if ends_earlier:
            self._last[place] = self

    @property
    def is_open(self) -> bool:
        """Whether it has not ended."""
        return self._abandon.alive

    def abandon(self) -> None:
        """Ends it without a commit, as if it were dropped; does nothing from the commit on."""
        self._abandon()

    def hand_over(self) -> None:
        """Ends it and removes nothing: another rank, whose claim protects all, commits."""
        if self._abandon.detach() is not None:
            self._opened.close()

    def begin_commit(self) -> None:
        """From here on only the methods below end it: no file may go while the metadata comes.

        Raises:
            NotCommitted: it has ended, and files of the save may have been removed.
        """
        if self._abandon.detach() is None:
            raise NotCommitted(
                f"{self._opened.path}: this save was given up before its commit, because the "
                "interpreter ends or its thread began another save into the directory; save again"
            )

    def committed(self, metadata: bytes, files: set[str]) -> None:
        """Ends it after the commit, and removes what no metadata names any more; never raises.

        Args:
            metadata: what was committed.
            files: the data files that it names.
        """
        try:
            if self._opened.try_lock_exclusive():
                _sweep(self._opened, self._rank, _Commit(metadata, files))
        finally:
            self._opened.close()

    def not_committed(self) -> None:
        """Ends it after a commit that failed and has published nothing, as :meth:`abandon`."""
        _abandon(self._opened, self._rank, os.getpid())

    def remove(self, names: Iterable[str]) -> None:
        """Removes files of the save, which go on being claimed; warns where that fails."""
        remove_files(self._opened, names)

    def leave(self) -> None:
        """Ends it and removes nothing: where the commit may or may not last."""
        self._opened.close()


def choose_prefix(directory: OpenDirectory, prefix: str, taken: Collection[str] = ()) -> str:
    """The prefix of one rank's data files: ``prefix``, tagged where files of this kind are there.

    Args:
        directory: of the checkpoint.
        prefix: ``__{rank}_``, and the tag of the save where it has one.
        taken: by other saves of this process that may not have made their files yet.

    Raises:
        OSError: the directory cannot be listed.
    """
    match = _PREFIX.match(prefix)
    if match is None:
        return prefix
    is_taken = prefix in taken
    for name in directory.names():
        data = _DATA_FILE.search(name)
        if _METADATA_FILE.match(name) or (data and data.group(1) == match.group(1)):
            is_taken = True
            break
    # A tag of its own also where there is one: a plan may be an earlier save's.
    return f"__{match.group(1)}_{uuid.uuid4().hex[:8]}_" if is_taken else prefix


def remove_own(directory: OpenDirectory, names: Iterable[str]) -> None:
    """Removes files that a rank has written for a save that failed; warns where that fails.

    Only while nobody else works in the directory, and what no metadata names: this rank may have
    been stopped and given up, and what has its names by now may be another save's. Where the
    coordinator is there to end the save it removes the files of all ranks; see :class:`Claim`.
    """
    mine = set(names)
    try:
        with closing(directory.reopen()) as opened:
            if opened.try_lock_exclusive():
                remove_files(
                    opened, [name for name in _unnamed(opened, None, None) if name in mine]
                )
    except Exception as error:
        warn(f"unused files are left in {directory.path}: {error}")


def remove_leftovers(checkpoint_id: str | os.PathLike[str]) -> list[str]:
    """Removes the files of saves that died, which every later save does, too, after its commit.

    Args:
        checkpoint_id: directory of the checkpoint, or of one that never came to be.

    Returns:
        The names of the removed files: data files that no metadata names, temporary metadata.

    Raises:
        CheckpointError: a save or a load is under way in the directory.
        Corrupt, Unsafe: metadata is there and cannot be read, so it may name any file.
        OSError: the directory cannot be read or fsynced, or a file not be removed.
    """
    with closing(OpenDirectory(checkpoint_id)) as opened:
        if not opened.try_lock_exclusive():
            raise CheckpointError(
                f"{opened.path}: a save or a load is under way; try again when it has ended"
            )
        opened.sync()
        names = _unnamed(opened, None, None)
        for name in names:
            opened.remove(name)
        return names


def refuse_hidden_save(directory: OpenDirectory, rank: int | None) -> None:
    """Refuses a save by ranks on their own into a directory with a common checkpoint.

    Loading looks for the common metadata first, so it would go on finding the old checkpoint.

    Raises:
        FileExistsError: there is a common checkpoint.
    """
    if rank is not None and METADATA_NAME in directory.names():
        raise FileExistsError(
            17,
            "a checkpoint of all ranks is here, and a save with use_collectives=False would not "
            "replace it; choose another directory",
            os.path.join(directory.path, METADATA_NAME),
        )


def remove_files(directory: OpenDirectory, names: Iterable[str]) -> None:
    """Removes files that are known to be named by no metadata; warns where that fails."""
    for name in names:
        try:
            directory.remove(name)
        except OSError as error:
            warn(f"an unused file could not be removed: {error}")


def _abandon(opened: OpenDirectory, rank: int | None, pid: int) -> None:
    try:
        # A forked child has a copy of the claim, and its parent may go on with the save.
        if os.getpid() == pid and opened.try_lock_exclusive():
            _sweep(opened, rank, None)
    finally:
        opened.close()


def _sweep(opened: OpenDirectory, rank: int | None, commit: _Commit | None) -> None:
    """Removes what no metadata names; warns where that fails.

    Args:
        opened: the directory, which nobody else uses.
        rank: the rank whose files are looked at, where ranks save on their own. None: those of all
            ranks, and the metadata of single ranks, which a common one has superseded.
        commit: of the save that ends; None: there was none.
    """
    try:
        if commit is not None and rank is None:
            matches = map(_METADATA_FILE.match, opened.names())
            superseded = [match.group() for match in matches if match and match.group(1)]
            remove_files(opened, superseded)
            if superseded:
                # A power cut must not bring them back after their data files have gone.
                opened.sync()
        unnamed = _unnamed(opened, rank, commit.files if commit else None)
        if unnamed and commit and metadata_bytes_in(opened, metadata_name(rank)) != commit.metadata:
            # Another save has committed since, and has ended.
            commit = None
            unnamed = _unnamed(opened, rank, None)
        if unnamed and commit is None:
            # The metadata may be that of a save whose last fsync failed, or never was.
            opened.sync()
        remove_files(opened, unnamed)
    except Exception as error:
        # Nothing that is needed is lost.
        warn(f"unused files are left in {opened.path}: {error}")


def _unnamed(opened: OpenDirectory, rank: int | None, used: set[str] | None) -> list[str]:
    """Data files and temporary ones that no metadata names, sorted.

    Args:
        rank: whose; None: all ranks'.
        used: what the metadata of ``rank`` names; None: look into it.
    """
    names = sorted(opened.names())
    unnamed = []
    for name in names:
        match = _DATA_FILE.search(name) or _TEMPORARY.match(name)
        if match and name not in (used or ()) and (rank is None or match.group(1) == str(rank)):
            unnamed.append(name)
    if not unnamed:
        return []
    named: set[str] = set()
    for name in names:
        if _METADATA_FILE.match(name) and (used is None or name != metadata_name(rank)):
            metadata = read_metadata_in(opened, name)
            named.update(info.relative_path for info in metadata.storage_data.values())
    return [name for name in unnamed if name not in named]
