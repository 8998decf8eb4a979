"""Leases that saves hold on checkpoint directories. csrc/directory/lease.h has the protocol."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Collection, Iterable
from contextlib import closing
from typing import ClassVar

from torch_ckpt import _core
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.index import METADATA_NAME, with_known_dtypes
from torch_ckpt.errors import CheckpointError, NotCommitted

#: Seconds for which a save waits while another process removes files. Large files take seconds.
PATIENCE_SECONDS = 60.0


class DirectoryLease:
    """A save's lease on a checkpoint directory.

    The coordinator holds a lease; if ranks save independently, every rank does. Other ranks also
    take one if the coordinator's lease may belong to another save.

    If a lease is dropped before commit(), the save has failed, and the files of all its ranks are
    deleted. The same happens if the thread takes another lease on the directory, because an
    exception that the program has kept may keep the lease of the failed save alive.

    Args:
        directory: the checkpoint directory. The lease opens its own descriptor.
        rank: the rank whose own metadata the save writes; None if the save writes metadata for all
            ranks.
        ends_earlier: True if this lease ends the thread's earlier lease on the directory, and a
            later lease ends this one. Pass False if the thread may run several saves to the
            directory at once.
        patience: seconds to wait while another process holds the exclusive lock.

    Attributes:
        tag: the text that follows the rank in the names of the save's data files; may be empty.

    Raises:
        OSError: the directory cannot be opened or listed.
        CheckpointError: another process did not release its exclusive lock in time.
    """

    # The last lease for each thread and directory.
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
        key = threading.get_ident(), *directory.identity()
        other = self._last.get(key)
        if other is not None and ends_earlier:
            other.discard()
        self._held = _core.DirectoryLease(directory, rank, patience)
        self.tag = self._held.tag
        self._path = directory.path
        # Keeps the thread that starts the next save from closing the descriptor while another
        # thread uses it to remove files of a cancelled save. Reentrant, because a signal handler
        # may start a save.
        self._lock = threading.RLock()
        self._end = weakref.finalize(self, _discard, self._held, self._lock, os.getpid())
        if ends_earlier:
            self._last[key] = self

    @property
    def is_open(self) -> bool:
        """True if the lease has not ended."""
        return self._end.alive

    def discard(self) -> None:
        """Ends the lease and deletes the save's files. Has no effect once the commit has begun."""
        self._end()

    def hand_over(self) -> None:
        """Ends the lease without removing files, because another rank holds a lease that protects
        all files and will commit."""
        if self._end.detach() is not None:
            with self._lock:
                self._held.close()

    def remove(self, names: Iterable[str]) -> None:
        """Removes files that the save no longer needs. Warns if that fails.

        Has no effect after the lease has ended, because then the files are already deleted.
        """
        with self._lock:
            if self.is_open:
                self._held.remove(list(names))

    def commit(
        self,
        metadata: _core.EncodedMetadata,
        files: Collection[str],
        *,
        sync: bool,
        replace: bool,
    ) -> None:
        """Publishes the metadata, removes files that no metadata names, and ends the lease.

        Args:
            metadata: the contents of ``.metadata``.
            files: the data files that the metadata names.
            sync: fsync the metadata.
            replace: replace existing metadata.

        Raises:
            NotCommitted: nothing was published. ``files`` were deleted, or the lease had already
                ended, so that files of the save may have been deleted.
            DurabilityUncertain: the last fsync failed, or it is unknown whether the rename took
                effect. No file was removed.
        """
        if self._end.detach() is None:
            raise NotCommitted(
                f"{self._path}: this save was abandoned before its commit, because the "
                "interpreter is exiting or its thread started another save to the directory; "
                "save again"
            )
        with self._lock:
            self._held.commit(metadata, list(files), sync, replace)


def _discard(held: _core.DirectoryLease, lock: threading.RLock, pid: int) -> None:
    # In a forked child, only close the descriptor: the parent may continue the save. Do not take
    # the lock: it may be held by a thread that does not exist in the child.
    if os.getpid() != pid:
        held.close()
        return
    with lock:
        held.discard()


def remove_own(directory: OpenDirectory, names: Iterable[str]) -> None:
    """Removes files that this rank wrote for a failed save. Warns if that fails.

    Removes only files that no metadata names, and only if no other process holds a lock on the
    directory: this rank may have been suspended and declared dead, and another save may have reused
    its file names. If the coordinator is alive, it removes the files of all ranks.
    """
    _core.remove_own(directory, list(names))


def remove_leftovers(checkpoint_id: str | os.PathLike[str]) -> list[str]:
    """Removes files left behind by interrupted saves. Each save also does this after its commit.

    Args:
        checkpoint_id: the checkpoint directory; it need not contain a committed checkpoint.

    Returns:
        The names of the removed files: data files that no metadata refers to, and temporary
        metadata files.

    Raises:
        CheckpointError: a save or load is in progress in the directory, or the file system does not
            support the locks needed to detect one.
        Corrupt, Unsafe: a metadata file cannot be read, so any file might still be referenced.
        OSError: the directory cannot be read or fsynced, or a file cannot be removed.

    Examples:
        ```python
        for name in remove_leftovers("checkpoints/100"):
            print("removed", name)
        ```
    """
    with closing(OpenDirectory(checkpoint_id)) as opened:
        removed = with_known_dtypes(lambda: _core.remove_leftovers(opened))
        if removed is None and not opened.has_locks:
            raise CheckpointError(
                f"{opened.path}: the file system does not support flock, so a running save cannot "
                "be detected, and nothing was removed. Make sure that no process saves to or loads "
                "from this directory, then delete the data files that no metadata names yourself"
            )
        if removed is None:
            raise CheckpointError(
                f"{opened.path}: a save or load is in progress; try again after it ends"
            )
        return removed


def refuse_hidden_save(directory: OpenDirectory, rank: int | None) -> None:
    """Raises FileExistsError if a rank would save independently to a directory that already has a
    checkpoint of all ranks.

    A load prefers the metadata of all ranks, so it would still load the old checkpoint.
    """
    if rank is not None and METADATA_NAME in directory.names():
        raise FileExistsError(
            17,
            "the directory already has a checkpoint of all ranks, which a save with "
            "use_collectives=False would not replace; choose another directory",
            os.path.join(directory.path, METADATA_NAME),
        )
