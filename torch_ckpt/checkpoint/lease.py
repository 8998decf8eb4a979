"""A save's part in a checkpoint's directory. csrc/directory/lease.h has the protocol."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Collection, Iterable
from contextlib import closing
from typing import ClassVar

from torch_ckpt import _core
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.index import METADATA_NAME, read_index_in
from torch_ckpt.errors import CheckpointError, NotCommitted

#: How long a save waits for a process that removes files, which takes seconds where they are large.
PATIENCE_SECONDS = 60.0


class DirectoryLease:
    """Of the coordinator, or of each rank where ranks save alone.

    Other ranks have one, too, as long as the coordinator's may be another save's.

    Dropped without a commit it is that of a save that failed, whose files then go, whichever rank
    wrote them. So it is when the thread that made it makes another one for the directory: who keeps
    an exception may keep the first one, too.

    Args:
        directory: of the checkpoint. The lease has a descriptor of its own.
        rank: whose metadata it will be; None: that of all ranks.
        ends_earlier: False where the thread's saves into the directory may be under way together,
            and it neither ends others nor is ended.
        patience: seconds to wait for somebody who has the directory alone.

    Raises:
        OSError: the directory cannot be opened or listed.
        CheckpointError: another process does not end to remove files there.
    """

    # By thread and directory.
    _last: ClassVar[weakref.WeakValueDictionary[tuple[int, ...], DirectoryLease]] = (
        weakref.WeakValueDictionary()
    )

    def __init__(
        self,
        directory: OpenDirectory,
        rank: int | None,
        ends_earlier: bool = True,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        place = threading.get_ident(), *directory.identity()
        other = self._last.get(place)
        if other is not None and ends_earlier:
            other.abandon()
        self._held = _core.DirectoryLease(directory, rank, patience)
        self._path = directory.path
        # A thread that removes a cancelled save's files goes by the descriptor which another one,
        # that begins the next save, closes. Reentrant: a signal handler may begin one.
        self._lock = threading.RLock()
        self._abandon = weakref.finalize(self, _abandon, self._held, self._lock, os.getpid())
        if ends_earlier:
            self._last[place] = self

    @property
    def tag(self) -> str:
        """What goes behind the rank in the names of the save's data files; may be empty."""
        return self._held.tag

    @property
    def is_open(self) -> bool:
        """Whether it has not ended."""
        return self._abandon.alive

    def abandon(self) -> None:
        """Ends it without a commit, as if it were dropped; does nothing from the commit on."""
        self._abandon()

    def hand_over(self) -> None:
        """Ends it and removes nothing: another rank, whose lease protects all, commits."""
        if self._abandon.detach() is not None:
            with self._lock:
                self._held.close()

    def remove(self, names: Iterable[str]) -> None:
        """Removes files of the save, which goes on; warns where that fails.

        Does nothing where the lease has ended, whose save's files have gone by then.
        """
        with self._lock:
            if self.is_open:
                self._held.remove(list(names))

    def commit(self, metadata: bytes, files: Collection[str], *, sync: bool, replace: bool) -> None:
        """Publishes the metadata, removes what no metadata names any more, and ends it.

        Args:
            metadata: encoded.
            files: the data files that it names.
            sync: whether it is fsynced.
            replace: whether it may replace other metadata.

        Raises:
            NotCommitted: nothing was published, and ``files`` are gone; or the lease has ended
                before, and files of the save may have been removed.
            DurabilityUncertain: the last fsync failed, or whether the rename was carried out is not
                known; nothing is removed.
        """
        if self._abandon.detach() is None:
            raise NotCommitted(
                f"{self._path}: this save was abandoned before its commit, because the "
                "interpreter is exiting or its thread started another save into the directory; "
                "save again"
            )
        with self._lock:
            self._held.commit(metadata, list(files), sync, replace, named_files)


def _abandon(held: _core.DirectoryLease, lock: threading.RLock, pid: int) -> None:
    # A forked child has a copy of the lease, and its parent may go on with the save. There the lock
    # may be that of a thread which the child does not have.
    if os.getpid() != pid:
        held.close()
        return
    with lock:
        held.abandon(named_files)


def named_files(directory: OpenDirectory, name: str) -> set[str]:
    """The data files that metadata names.

    Raises:
        CheckpointError, OSError: it cannot be read whole.
    """
    # "./__0_0.distcp" is a name for it, too, to all who load it.
    return {os.path.normpath(file) for file in read_index_in(directory, name).files()}


def remove_own(directory: OpenDirectory, names: Iterable[str]) -> None:
    """Removes files that a rank has written for a save that failed; warns where that fails.

    Only while nobody else works in the directory, and what no metadata names: this rank may have
    been stopped and given up, and what has its names by now may be another save's. Where the
    coordinator is there to end the save it removes the files of all ranks.
    """
    _core.remove_own(directory, list(names), named_files)


def remove_leftovers(checkpoint_id: str | os.PathLike[str]) -> list[str]:
    """Removes the files of saves that died, which every later save does, too, after its commit.

    Args:
        checkpoint_id: directory of the checkpoint, or of one that never came to be.

    Returns:
        The names of the removed files: data files that no metadata names, temporary metadata.

    Raises:
        CheckpointError: a save or a load is under way in the directory, or the file system has no
            locks that would show it.
        Corrupt, Unsafe: metadata is there and cannot be read, so it may name any file.
        OSError: the directory cannot be read or fsynced, or a file not be removed.
    """
    with closing(OpenDirectory(checkpoint_id)) as opened:
        removed = _core.remove_leftovers(opened, named_files)
        if removed is None and not opened.has_locks:
            raise CheckpointError(
                f"{opened.path}: the file system has no flock, so a save under way cannot be "
                "detected, and nothing was removed. If no process saves or loads here, delete the "
                "data files that no metadata names yourself"
            )
        if removed is None:
            raise CheckpointError(
                f"{opened.path}: a save or a load is under way; try again after it ends"
            )
        return removed


def refuse_hidden_save(directory: OpenDirectory, rank: int | None) -> None:
    """Refuses a save by ranks on their own into a directory with a common checkpoint.

    Loading looks for the common metadata first, so it would go on finding the old checkpoint.

    Raises:
        FileExistsError: there is a common checkpoint.
    """
    if rank is not None and METADATA_NAME in directory.names():
        raise FileExistsError(
            17,
            "the directory has a checkpoint of all ranks, which a save with use_collectives=False "
            "would not replace; choose another directory",
            os.path.join(directory.path, METADATA_NAME),
        )
