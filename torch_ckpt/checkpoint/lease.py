"""A save's hold on a checkpoint's directory. csrc/directory/lease.h describes the protocol."""

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

#: Seconds for which a save waits for a process that removes files; large files take seconds.
PATIENCE_SECONDS = 60.0


class DirectoryLease:
    """A save's hold on a checkpoint's directory.

    The coordinator has one; if ranks save independently, every rank does. Other ranks also take one
    if the coordinator's may turn out to belong to another save.

    If it is dropped before commit(), the save has failed, and the files of all ranks are deleted.
    The same happens when its thread takes another lease of the directory, because a kept exception
    may keep the first one alive.

    Args:
        directory: the checkpoint's directory. The lease uses a descriptor of its own.
        rank: the rank whose metadata the save writes; None: the metadata of all ranks.
        ends_earlier: False if the thread may run several saves into the directory at once; then
            this lease ends no other one and is not ended by others.
        patience: seconds to wait for a process that has locked the directory exclusively.

    Raises:
        OSError: the directory cannot be opened or listed.
        CheckpointError: another process did not release its exclusive lock in time.
    """

    # The last lease by thread and directory.
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
        # Without the lock, the thread that starts the next save could close the descriptor that
        # another thread uses to remove a cancelled save's files. Reentrant, because a signal
        # handler may start a save.
        self._lock = threading.RLock()
        self._abandon = weakref.finalize(self, _abandon, self._held, self._lock, os.getpid())
        if ends_earlier:
            self._last[place] = self

    @property
    def tag(self) -> str:
        """The text that follows the rank in the names of the save's data files; may be empty."""
        return self._held.tag

    @property
    def is_open(self) -> bool:
        """True if the lease has not ended."""
        return self._abandon.alive

    def abandon(self) -> None:
        """Ends the lease without a commit, as dropping it does. Does nothing once the commit has
        begun."""
        self._abandon()

    def hand_over(self) -> None:
        """Ends the lease and removes nothing: another rank, whose lease protects all files,
        commits."""
        if self._abandon.detach() is not None:
            with self._lock:
                self._held.close()

    def remove(self, names: Iterable[str]) -> None:
        """Removes files of the save, which continues. Warns if that fails.

        Does nothing if the lease has ended, because the files have been deleted by then.
        """
        with self._lock:
            if self.is_open:
                self._held.remove(list(names))

    def commit(self, metadata: bytes, files: Collection[str], *, sync: bool, replace: bool) -> None:
        """Publishes the metadata, removes the files that no metadata names, and ends the lease.

        Args:
            metadata: the encoded metadata.
            files: the data files that it names.
            sync: fsync the metadata.
            replace: allow it to replace other metadata.

        Raises:
            NotCommitted: nothing was published, and ``files`` were deleted; or the lease had ended
                before, and files of the save may have been deleted.
            DurabilityUncertain: the last fsync failed, or it is unknown whether the rename was
                carried out; nothing was removed.
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
    # A forked child has a copy of the lease, but its parent may continue the save. In the child, a
    # thread that does not exist there may hold the lock.
    if os.getpid() != pid:
        held.close()
        return
    with lock:
        held.abandon(named_files)


def named_files(directory: OpenDirectory, name: str) -> set[str]:
    """Returns the data files that metadata names.

    Raises:
        CheckpointError, OSError: the metadata cannot be read completely.
    """
    # All readers accept "./__0_0.distcp" for this name, too.
    return {os.path.normpath(file) for file in read_index_in(directory, name).files()}


def remove_own(directory: OpenDirectory, names: Iterable[str]) -> None:
    """Removes files that a rank has written for a failed save. Warns if that fails.

    Removes only files that no metadata names, and only if no other process works in the directory:
    this rank may have been stopped and declared dead, and another save may have reused its file
    names. If the coordinator is alive, it removes the files of all ranks.
    """
    _core.remove_own(directory, list(names), named_files)


def remove_leftovers(checkpoint_id: str | os.PathLike[str]) -> list[str]:
    """Removes the files of saves that died. Every later save also does this after its commit.

    Args:
        checkpoint_id: directory of the checkpoint; it may have no committed checkpoint.

    Returns:
        The names of the removed files: data files that no metadata names, and temporary metadata.

    Raises:
        CheckpointError: a save or a load is under way in the directory, or the file system has no
            locks that would show it.
        Corrupt, Unsafe: there is metadata that cannot be read, and may name any file.
        OSError: the directory cannot be read or fsynced, or a file cannot be removed.

    Examples:
        ```python
        for name in torch_ckpt.remove_leftovers("checkpoints/100"):
            print("removed", name)
        ```
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
    """Refuses an independent save of one rank into a directory with a checkpoint of all ranks.

    A load looks for the metadata of all ranks first, so it would still find the old checkpoint.

    Raises:
        FileExistsError: there is a checkpoint of all ranks.
    """
    if rank is not None and METADATA_NAME in directory.names():
        raise FileExistsError(
            17,
            "the directory has a checkpoint of all ranks, which a save with use_collectives=False "
            "would not replace; choose another directory",
            os.path.join(directory.path, METADATA_NAME),
        )
