"""Removals of files by a lease, and a lease that waits, beside other threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forked import run_script
from tests.gates import LIMIT
from torch_ckpt import Corrupt, Unsafe, _core
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.lease import DirectoryLease, remove_leftovers


@pytest.fixture(params=[b"plain", b"odd\xff"], ids=["plain", "not UTF-8"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> OpenDirectory:
    """Makes damaged metadata, and a file that it may name."""
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + request.param))
    path.mkdir()
    for name in (".metadata", "__0_0.distcp"):
        (path / name).write_bytes(b"x")
    return OpenDirectory(path)


def discard(directory: OpenDirectory) -> None:
    _core.DirectoryLease(directory, None, 1.0).discard()


def remove_own(directory: OpenDirectory) -> None:
    _core.remove_own(directory, ["__0_0.distcp"])


@pytest.mark.parametrize("remove", [discard, remove_own])
def test_metadata_that_cannot_be_read_is_warned_of_and_no_file_is_removed(
    directory: OpenDirectory, remove: Callable[[OpenDirectory], None]
) -> None:
    with pytest.warns(UserWarning, match="damaged or not a checkpoint's metadata") as warned:
        remove(directory)
    assert str(warned[0].message).startswith(
        f"unused files are left in {directory.path}: {directory.path}/.metadata is damaged"
    )
    assert sorted(directory.names()) == [".metadata", "__0_0.distcp"]


@pytest.mark.parametrize(
    ("contents", "error"), [(b"x", Corrupt), (b"\x80\4cos\nsystem\n.", Unsafe)]
)
def test_leftovers_stay_if_metadata_cannot_be_decoded(
    directory: OpenDirectory, contents: bytes, error: type[Exception]
) -> None:
    Path(directory.path, ".metadata").write_bytes(contents)
    with pytest.raises(error, match=r"\.metadata"):
        remove_leftovers(directory.path)
    assert sorted(directory.names()) == [".metadata", "__0_0.distcp"]


# The thread returns to Python while the interpreter ends.
ENDS = """
import ctypes, sys, threading
from torch_ckpt import _core
from torch_ckpt.checkpoint.directory import OpenDirectory
path = sys.argv[1]
directory = OpenDirectory(path)
waiting = threading.Event()
def wait():
    other = OpenDirectory(path)
    assert other.try_lock_exclusive()
    waiting.set()
    _core.DirectoryLease(directory, None, 30.0)
threading.Thread(target=wait, daemon=True).start()
waiting.wait()
class AtTheEnd:
    libc = ctypes.CDLL(None)
    def __del__(self, usleep=libc.usleep):
        usleep(300_000)  # the thread may never return from its call
sys.at_the_end = AtTheEnd()
"""


def test_a_lease_that_waits_in_a_daemon_thread_at_exit_does_not_end_the_process(
    tmp_path: Path,
) -> None:
    done = run_script(ENDS, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_lease_that_ends_during_a_removal_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = DirectoryLease(OpenDirectory(tmp_path), None)
    done: list[str] = []
    removing, may_go_on = threading.Event(), threading.Event()
    held = lease._held

    class Held:
        def remove(self, names: list[str]) -> None:
            removing.set()
            assert may_go_on.wait(LIMIT)
            held.remove(names)
            done.append("removed")

    monkeypatch.setattr(lease, "_held", Held())
    remover = threading.Thread(target=lease.remove, args=(["__0_0.distcp"],))
    remover.start()
    assert removing.wait(LIMIT)
    ender = threading.Thread(target=lambda: (lease.discard(), done.append("ended")))
    ender.start()
    assert not OpenDirectory(tmp_path).try_lock_exclusive()
    may_go_on.set()
    for thread in (remover, ender):
        thread.join(LIMIT)
    assert done == ["removed", "ended"]
    lease.remove(["__0_0.distcp"])
    assert done == ["removed", "ended"]
