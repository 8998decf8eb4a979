"""Small separate disks for tests: disks that can be filled, and one whose writes can be failed."""

from __future__ import annotations

import gc
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

_TIMEOUT_SECONDS = 30


def _command(*arguments: object) -> str:
    done = subprocess.run([str(a) for a in arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{arguments}: {done.stderr.strip()}")
    return done.stdout.strip()


def _skip_without(*tools: str) -> None:
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


@contextmanager
def mounted(mount_point: Path, *arguments: object) -> Iterator[Path]:
    """Mounts a file system for the time of a block. Skips the test if mounting is not allowed."""
    mount_point.mkdir()
    try:
        _command("mount", *arguments, mount_point)
    except RuntimeError as error:
        pytest.skip(f"mounting takes root: {error}")
    try:
        yield mount_point
    finally:
        # The error of a failed save may hold open files in a reference cycle.
        gc.collect()
        try:
            _command("umount", mount_point)
        except RuntimeError:
            _command("umount", "--lazy", mount_point)
            raise


@contextmanager
def _loop_device(file: Path) -> Iterator[str]:
    try:
        device = _command("losetup", "--find", "--show", file)
    except RuntimeError as error:
        pytest.skip(f"loop devices take root: {error}")
    try:
        yield device
    finally:
        _command("losetup", "--detach", device)


@contextmanager
def ext4_of(workdir: Path, size_bytes: int) -> Iterator[Path]:
    """Creates and mounts an ext4 file system."""
    _skip_without("mkfs.ext4", "losetup", "mount")
    image = workdir / "image"
    with image.open("wb") as file:
        file.truncate(size_bytes)
    _command("mkfs.ext4", "-q", "-F", image)
    with _loop_device(image) as device, mounted(workdir / "disk", device) as disk:
        yield disk


class FailingDisk:
    """A disk whose writes can be failed.

    Attributes:
        path: mount point of its file system.
    """

    def __init__(self, path: Path, trigger: Path) -> None:
        self.path = path
        self._trigger = trigger

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Fails every write to the medium with EIO for the time of a block."""
        self._trigger.touch()
        try:
            yield
        finally:
            self._trigger.unlink()


@contextmanager
def failing_disk(workdir: Path, size_bytes: int = 64 << 20) -> Iterator[FailingDisk]:
    """Creates an ext4 on a loop device over a FUSE file, whose writes nbdkit can fail.

    It has no journal: with a journal, errors would make the file system read-only, instead of
    letting it continue as if nothing had happened.
    """
    _skip_without("nbdkit", "nbdfuse", "mkfs.ext4", "losetup", "mount", "umount")
    trigger = workdir / "fail"
    medium = workdir / "medium"
    medium.mkdir()
    with ExitStack() as stack:
        # nbdfuse writes its process id to this pipe when it begins to serve.
        pid_file = workdir / "ready"
        os.mkfifo(pid_file)
        ready = os.open(pid_file, os.O_RDWR)
        stack.callback(os.close, ready)
        command = ["nbdfuse", "--pidfile", str(pid_file), str(medium / "disk")]
        command += ["[", "nbdkit", "--exit-with-parent"]
        command += ["--filter=error", "memory", str(size_bytes), "error-pwrite=EIO"]
        command += ["error-pwrite-rate=100%", f"error-pwrite-file={trigger}", "]"]
        served = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        stack.callback(_ended, served, medium)
        _wait_until(ready, served)
        _command("mkfs.ext4", "-q", "-F", "-O", "^has_journal", medium / "disk")
        device = stack.enter_context(_loop_device(medium / "disk"))
        options = ("-o", "errors=continue")
        path = stack.enter_context(mounted(workdir / "disk", *options, device))
        yield FailingDisk(path, trigger)


def _wait_until(ready: int, served: subprocess.Popen[str]) -> None:
    readable, _, _ = select.select([ready], [], [], _TIMEOUT_SECONDS)
    if not readable:
        assert served.stderr is not None
        served.kill()
        pytest.skip(f"nbdfuse does not run here: {served.stderr.read().strip()}")


def _ended(served: subprocess.Popen[str], medium: Path) -> None:
    subprocess.run(["umount", str(medium)], capture_output=True)
    try:
        served.wait(_TIMEOUT_SECONDS)
    finally:
        served.kill()
        served.wait()
