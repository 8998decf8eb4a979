"""This machine and its file systems: paths, mounts, free space, memory for I/O."""

from __future__ import annotations

import functools
import mmap
import os
import re
from collections.abc import Callable, Iterable
from errno import ENOSPC
from pathlib import Path
from typing import NamedTuple

from torch_ckpt._base.formatting import size

# --- local paths and URLs -------------------------------------------------------------------------


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://")


def is_url(path: object) -> bool:
    """Returns True for a string that begins with ``scheme://``. Path objects are always local."""
    return isinstance(path, str) and _URL.match(path) is not None


def local_path(path: str | os.PathLike[str]) -> str | None:
    """Returns a local path, also for a URL that begins with ``file://`` or ``local://``. Returns
    None for any other URL."""
    text = os.fspath(path)
    scheme, separator, rest = text.partition("://")
    if separator and scheme in ("file", "local"):
        return rest
    return None if is_url(text) else text


def refuse_url(path: object) -> None:
    """Raises ValueError if ``path`` is a URL, which pathlib would treat as a relative path."""
    if is_url(path):
        raise ValueError(
            f"{path} is a URL, and a local path is needed here. CheckpointManager and "
            "torch_ckpt.save, async_save and load accept URLs (see docs/remote.md)."
        )


def absolute(path: str | os.PathLike[str]) -> Path:
    """Makes a path absolute. Keeps symbolic links and ``..`` for the kernel to resolve."""
    return Path(path).absolute()


# --- mounted file systems -------------------------------------------------------------------------


class Mount(NamedTuple):
    """A mounted file system.

    Attributes:
        point: the mount point.
        file_system: the type, such as "ext4" or "fuse.sshfs".
        source: the device or the server.
        options: of the mount and of the file system.
    """

    point: str
    file_system: str
    source: str
    options: str


def mount_of(path: str | os.PathLike[str]) -> Mount:
    """Returns the mounted file system that has a path. Follows symbolic links."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        return find_mount(os.path.realpath(path), map(parse_mount, lines))


def parse_mount(line: str) -> Mount:
    """Parses a line of ``mountinfo``; proc(5) describes the fields."""
    own, _, super_block = line.partition(" - ")
    fields, (file_system, source, options) = own.split(), super_block.split(maxsplit=2)
    # Spaces and some other characters are escaped as octal numbers.
    point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), fields[4])
    both = dict.fromkeys([*fields[5].split(","), *options.strip().split(",")])
    return Mount(point, file_system, source, ",".join(both))


def find_mount(path: str, mounts: Iterable[Mount]) -> Mount:
    """Finds the deepest mount that contains a path without symbolic links.

    If several mounts have the same mount point, the last one applies.
    """
    found = Mount("/", "unknown", "", "")
    for mount in mounts:
        prefix = mount.point.rstrip("/") + "/"
        if f"{path}/".startswith(prefix) and len(mount.point) >= len(found.point):
            found = mount
    return found


# --- free space -----------------------------------------------------------------------------------


def require_room(
    directory: str,
    wanted: int,
    need: str,
    remedy: str,
    make_room: Callable[[], None] | None = None,
) -> None:
    """Checks that this user may write ``wanted`` bytes to a directory.

    Args:
        wanted: number of bytes.
        need: start of the error message: what needs how many bytes.
        remedy: end of the error message: what to do.
        make_room: called if there is too little space. Then the space is checked again.

    Raises:
        OSError: there is too little space (``ENOSPC``), or the free space cannot be queried.
    """
    free = free_bytes(directory)
    if free is not None and free < wanted and make_room is not None:
        make_room()
        free = free_bytes(directory)
    if free is not None and free < wanted:
        raise OSError(ENOSPC, f"{need}, but only {size(free)} are free: {remedy}", directory)


def free_bytes(directory: str) -> int | None:
    """Returns the number of bytes that this user may write, or None if the file system does not
    report it, like some FUSE file systems. Then only a failed write reveals that the disk is full.

    Raises:
        OSError: the free space cannot be queried.
    """
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize if status.f_blocks else None


# --- memory ---------------------------------------------------------------------------------------


def memory_for_io(count: int) -> memoryview:
    """Returns ``count`` bytes, which are zero, at the beginning of a page. Direct I/O needs memory
    that begins there."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return memoryview(mmap.mmap(-1, max(count, 1), flags=flags))[:count]


# --- the machine ----------------------------------------------------------------------------------


@functools.cache
def boot_id() -> str:
    """Returns the kernel's identifier of this boot, which all containers of a machine share; "" if
    it cannot be read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
