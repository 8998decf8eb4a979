"""A checkpoint's directory, held open, and whether all ranks opened the same one.

A path leads to a directory only for as long as nobody renames one, retargets a link or changes the
working directory. So a save, a load and a verification open the directory once, and make each call
by that descriptor: ``OpenDirectory`` is csrc/os/directory.h. csrc/directory/lease.h says who locks
it when, and what may be removed.
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
            f"another process has had {directory.path} for itself for long; files that it removes "
            "may be missing in this load",
            stacklevel=3,
        )
    return directory


class Place(NamedTuple):
    """Which directory a rank has opened, in a form that can be sent.

    Device and inode numbers of one directory differ from host to host on some network file systems,
    and ranks may save into directories of their own. So places are compared only where a path must
    lead all processes to the same directory: on one host, with the same mounts.

    Attributes:
        mounts: of the process; empty where they are not known.
        path: that was opened.
        identity: of the directory.
    """

    mounts: str
    path: str
    identity: tuple[int, int, int, int]

    @classmethod
    def of(cls, directory: OpenDirectory) -> Place:
        """That of an open directory."""
        return cls(_mounts(), directory.path, directory.identity())

    def contradicts(self, other: Place) -> bool:
        """Whether one path has led to two directories."""
        return (
            bool(self.mounts)
            and (self.mounts, self.path) == (other.mounts, other.path)
            and self.identity != other.identity
        )


def require_one_directory(places: Iterable[Place | None]) -> None:
    """Refuses a save whose ranks have opened several directories, although their path is the same.

    Args:
        places: of the ranks; None where there is none.

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
