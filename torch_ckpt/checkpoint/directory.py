"""A checkpoint's directory that is held open, and the check that all ranks opened the same one.

A path leads to the same directory only until a directory is renamed, a link is changed, or the
working directory changes. So a save, a load and a verification open the directory once and use its
descriptor for every call: ``OpenDirectory`` is csrc/os/directory.h. csrc/directory/lease.h
describes the locks, and the files that may be removed.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterable
from typing import NamedTuple

from torch_ckpt._core import Directory as OpenDirectory
from torch_ckpt.errors import NotCommitted

__all__ = ["OpenDirectory", "Place", "require_one_directory", "share_or_warn"]


def share_or_warn(directory: OpenDirectory) -> OpenDirectory:
    """Locks a directory, so that no other process removes files in it while it is open.

    Warns if another process holds its lock for too long.
    """
    if not directory.share():
        warnings.warn(
            f"{directory.path}: another process has held its exclusive lock for too long; this "
            "load fails if that process removes files of the checkpoint",
            stacklevel=3,
        )
    return directory


class Place(NamedTuple):
    """Identity of the directory that a rank has opened, in a form that can be sent.

    Device and inode numbers of a directory differ between hosts on some network file systems, and
    ranks may save into different directories. So identities are compared only if a path must lead
    all processes to the same directory: on one host, with the same mounts.

    Attributes:
        mounts: identity of the host and the mounts of the process; empty if unknown.
        path: the path that was opened.
        identity: the numbers of the directory.
    """

    mounts: str
    path: str
    identity: tuple[int, int, int, int]

    @classmethod
    def of(cls, directory: OpenDirectory) -> Place:
        """Returns the identity of an open directory."""
        return cls(_mounts(), directory.path, directory.identity())

    def contradicts(self, other: Place) -> bool:
        """Returns True if one path has led to two directories."""
        return (
            bool(self.mounts)
            and (self.mounts, self.path) == (other.mounts, other.path)
            and self.identity != other.identity
        )


def require_one_directory(places: Iterable[Place | None]) -> None:
    """Raises an error if ranks opened different directories under the same path.

    Args:
        places: the identities of all ranks; None for a rank that sent none.

    Raises:
        NotCommitted: the path has led to several directories since the save began.
    """
    first: dict[tuple[str, str], Place] = {}
    for place in places:
        if place is None:
            continue
        if first.setdefault((place.mounts, place.path), place).contradicts(place):
            raise NotCommitted(
                f"{place.path}: ranks of this save opened different directories under this path: "
                "a directory was renamed, or a link in the path was changed, while the save "
                "started. Nothing was published; save again"
            )


@functools.cache
def _mounts() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        space, root = os.stat("/proc/self/ns/mnt"), os.stat("/")
    except OSError:
        return ""
    return f"{boot} {space.st_ino} {root.st_dev} {root.st_ino}"
