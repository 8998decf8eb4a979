"""Separate file systems in image files, for power cuts and crashes.

The kernel cuts the power: ``FS_IOC_SHUTDOWN`` without a journal flush ends all traffic of a mounted
file system at once, so data that the block device has not received is lost. Mounting the image
again replays the journal, as after a real power cut.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_FS_IOC_SHUTDOWN = 0x8004587D
_NO_LOG_FLUSH = struct.pack("I", 2)

#: For commands that take milliseconds.
_PATIENCE_SECONDS = 60

#: Images are in memory if they fit: flushes of the disk that holds the images are not tested.
_MEMORY = Path("/dev/shm")
_MEMORY_BYTES_WANTED = 1 << 30


@dataclass(frozen=True)
class Kind:
    """A kind of file system.

    Attributes:
        image_bytes: size of an image, which is sparse.
        make: the mkfs command, without the image.
        sector_bytes: size of the unit that its disk must write atomically.
        mount_options: options for ``mount -o``.
    """

    image_bytes: int
    make: tuple[str, ...]
    sector_bytes: int
    mount_options: str = "loop"


# Write everything in mkfs; lazy initialization would write during a recording.
_ALL_AT_ONCE = "lazy_itable_init=0,lazy_journal_init=0,nodiscard"

#: The kinds of file systems, by name.
KINDS = {
    "ext4": Kind(
        64 << 20,
        ("mkfs.ext4", "-q", "-F", "-b", "4096", "-m", "0", "-E", _ALL_AT_ONCE),
        # The superblock has 1 KiB and a checksum, and mounting does not journal it. If a disk tears
        # it, the file system cannot be mounted.
        sector_bytes=4096,
    ),
    # The smallest size that mkfs.xfs accepts. Images are copies and share a UUID.
    "xfs": Kind(300 << 20, ("mkfs.xfs", "-q", "-f", "-K"), 512, "loop,nouuid"),
}


@functools.cache
def unavailable_reason(kind: str) -> str:
    """Returns the reason why a kind of file system cannot be used here; empty if it can."""
    if os.geteuid() != 0:
        return "mounting images takes root"
    if not os.path.exists("/dev/loop-control"):
        return "no loop devices: /dev/loop-control does not exist"
    command = KINDS[kind].make[0]
    if shutil.which(command) is None:
        return f"{command} is not installed"
    with open("/proc/filesystems") as known:
        if f"\t{kind}\n" not in known.read():
            return f"the kernel has no {kind}"
    with workshop() as shop:
        disk = shop.disk(kind)
        try:
            disk.mount()
        except OSError as error:
            return f"an image of {kind} cannot be mounted: {error}"
        try:
            disk.cut()
        except OSError as error:
            return f"{kind} has no FS_IOC_SHUTDOWN here: {error}"
    return ""


def skip_without(kind: str) -> None:
    if reason := unavailable_reason(kind):
        pytest.skip(f"{kind}: {reason}")


class Disk:
    """An image with a file system, and its mount point."""

    def __init__(self, kind: str, image: Path, point: Path) -> None:
        self.kind = kind
        self.image = image
        self.point = point
        self._mounted = False

    def mount(self) -> None:
        """Mounts the image, which replays the journal if necessary.

        Raises:
            OSError: the image cannot be mounted.
        """
        self.mount_device(self.image, KINDS[self.kind].mount_options)

    def mount_device(self, device: Path, options: str) -> None:
        self.point.mkdir(exist_ok=True)
        command = ["mount", "-t", self.kind, "-o", options, str(device), str(self.point)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_SECONDS)
        if done.returncode != 0:
            raise OSError(errno.EIO, done.stderr.strip(), str(self.image))
        self._mounted = True

    def unmount(self) -> None:
        """Unmounts the disk, which writes all data, except after a power cut.

        Raises:
            OSError: the file system is in use.
        """
        if not self._mounted:
            return
        command = ["umount", str(self.point)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_SECONDS)
        if done.returncode != 0:
            raise OSError(errno.EBUSY, done.stderr.strip(), str(self.point))
        self._mounted = False

    def sync(self) -> None:
        """Writes all dirty data, as the kernel does after a while."""
        subprocess.run(["sync", "-f", str(self.point)], check=True, timeout=_PATIENCE_SECONDS)

    def cut(self) -> None:
        """Cuts the power."""
        cut_power(self.point)


def cut_power(point: str | os.PathLike[str]) -> None:
    """Ends all traffic between the file system mounted at ``point`` and its device."""
    root = os.open(point, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.ioctl(root, _FS_IOC_SHUTDOWN, _NO_LOG_FLUSH)
    finally:
        os.close(root)


class Workshop:
    """Creates disks; see :func:`workshop`."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._blank: dict[str, Path] = {}
        self._count = 0

    def disk(self, kind: str, like: Disk | None = None) -> Disk:
        """Creates a disk with an empty file system, or as a copy of an unmounted disk."""
        self._count += 1
        name = f"{kind}-{self._count}"
        image = self.place / f"{name}.img"
        copy_sparse(like.image if like else self._blank_image(kind), image)
        return Disk(kind, image, self.place / name)

    def _blank_image(self, kind: str) -> Path:
        if kind not in self._blank:
            image = self.place / f"{kind}.img"
            with open(image, "wb") as file:
                file.truncate(KINDS[kind].image_bytes)
            command = [*KINDS[kind].make, str(image)]
            subprocess.run(command, check=True, timeout=_PATIENCE_SECONDS, capture_output=True)
            dig_holes(image)
            self._blank[kind] = image
        return self._blank[kind]


# Cleans up when the test process ends, even if it is killed, because mounts would outlive it.
_JANITOR = """
cat > /dev/null
grep -o " $1/[^ ]*" /proc/mounts | sort -r | while read -r point; do
  umount "$point" 2> /dev/null || umount -l "$point"
done
rm -rf "$1"
"""


@contextmanager
def workshop() -> Iterator[Workshop]:
    """Creates a directory for disks. All disks are unmounted and deleted in any case."""
    in_memory = os.access(_MEMORY, os.W_OK) and _free_bytes(_MEMORY) >= _MEMORY_BYTES_WANTED
    place = tempfile.mkdtemp(prefix="torch_ckpt-crash-", dir=_MEMORY if in_memory else None)
    janitor = subprocess.Popen(
        ["sh", "-c", _JANITOR, "janitor", place], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield Workshop(Path(place))
    finally:
        janitor.communicate(timeout=_PATIENCE_SECONDS)


def _free_bytes(place: Path) -> int:
    return shutil.disk_usage(place).free


def copy_sparse(source: Path, target: Path) -> None:
    """Copies a sparse file."""
    with open(source, "rb") as original, open(target, "wb") as copy:
        size = os.fstat(original.fileno()).st_size
        copy.truncate(size)
        for begin, end in _written_parts(original.fileno(), size):
            at = begin
            while at < end:
                data = os.pread(original.fileno(), min(end - at, 1 << 20), at)
                at += os.pwrite(copy.fileno(), data, at)


def dig_holes(image: Path) -> None:
    """Releases the blocks that contain only zeros."""
    command = ["fallocate", "--dig-holes", str(image)]
    # On a file system without holes, the image is only larger.
    subprocess.run(command, check=False, capture_output=True, timeout=_PATIENCE_SECONDS)


def _written_parts(fd: int, size: int) -> Iterator[tuple[int, int]]:
    at = 0
    while at < size:
        try:
            begin = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        at = os.lseek(fd, begin, os.SEEK_HOLE)
        yield begin, at
