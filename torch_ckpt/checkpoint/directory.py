"""An open checkpoint directory, and the check that all ranks have opened the same directory.

A path may later lead to another directory, because a directory is renamed, a link is changed, or
the process changes its working directory. So a save, a load or a verification opens the directory
once and uses its descriptor for every call: see csrc/os/directory.h for ``OpenDirectory``, and
csrc/directory/lease.h for the locks and the files that may be removed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from typing import NamedTuple, Protocol, TypeVar

from torch_ckpt._base.log import warn
from torch_ckpt._base.system import boot_id
from torch_ckpt._core import Directory as OpenDirectory
from torch_ckpt.errors import NotCommitted
from torch_ckpt.stores.folder import StreamFolder

__all__ = ["DirectoryIdentity", "OpenDirectory", "require_one_directory", "share_or_warn"]


class _Lockable(Protocol):
    @property
    def path(self) -> str: ...

    def share(self) -> bool: ...


L = TypeVar("L", bound=_Lockable)


def share_or_warn(directory: L) -> L:
    """Takes the shared lock on a directory, so that no other process removes files from it.

    If another process holds the exclusive lock for too long, warns and continues without the lock.
    """
    if not directory.share():
        warn(
            f"{directory.path}: another process has held the exclusive lock on the directory for "
            "too long. This load continues without a lock, and fails if that process removes files "
            "of the checkpoint"
        )
    return directory


class DirectoryIdentity(NamedTuple):
    """Identity of the directory that a rank has opened, which can be sent to other ranks.

    On some network file systems, the device and inode numbers of a directory differ between hosts.
    Ranks may also save to different directories on purpose. So two identities are compared only if
    the same path must lead to the same directory: on one host, with the same mounts.

    Attributes:
        mounts: identifies the host and the process's mounts; empty if unknown.
        path: the path that the rank opened.
        numbers: device, inode and time of birth of the directory.
    """

    mounts: str
    path: str
    numbers: tuple[int, int, int, int]

    @classmethod
    def of(cls, directory: OpenDirectory | StreamFolder) -> DirectoryIdentity:
        """Returns the identity of an open directory, or of the objects beneath a URL."""
        return cls(_mounts(), directory.path, directory.identity())


def require_one_directory(identities: Iterable[DirectoryIdentity | None]) -> bool:
    """Raises an error if ranks opened different directories under the same path.

    Args:
        identities: the identity that each rank sent; None for a rank that sent none.

    Returns:
        True if ranks may have different mounts, so that the path may lead to different directories
        although no identity shows it.

    Raises:
        NotCommitted: ranks opened different directories.
    """
    numbers: dict[tuple[str, str], tuple[int, ...]] = {}
    known = [own for own in identities if own is not None]
    for own in known:
        if own.mounts and numbers.setdefault(own[:2], own.numbers) != own.numbers:
            raise NotCommitted(
                f"{own.path}: ranks of this save opened different directories under this path: "
                "a directory was renamed, or a link in the path was changed, while the save "
                "started. Nothing was published; save again"
            )
    mounts = {own.mounts for own in known}
    return len(known) > 1 and (len(mounts) > 1 or "" in mounts)


@functools.cache
def _mounts() -> str:
    try:
        space, root = os.stat("/proc/self/ns/mnt"), os.stat("/")
    except OSError:
        return ""
    return f"{boot_id()} {space.st_ino} {root.st_dev} {root.st_ino}" if boot_id() else ""
