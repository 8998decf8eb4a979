"""Finds the mounted file system that has a path."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import NamedTuple


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
