"""Callbacks of csrc/python/directory.cpp during the removal of files: the names in the metadata."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.forked import run_script
from tests.gates import LIMIT
from torch_ckpt import NotCommitted, _core
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.lease import DirectoryLease

Named = Callable[[OpenDirectory, str], Iterable[str]]


@pytest.fixture(params=[b"plain", b"odd\xff"], ids=["plain", "not UTF-8"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> OpenDirectory:
    """Makes metadata, and a file that it may name."""
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + request.param))
    path.mkdir()
    for name in (".metadata", "__0_0.distcp"):
        (path / name).write_bytes(b"x")
    return OpenDirectory(path)


def abandon(directory: OpenDirectory, named: Named) -> None:
    _core.DirectoryLease(directory, None, 1.0).abandon(named)


def remove_own(directory: OpenDirectory, named: Named) -> None:
    _core.remove_own(directory, ["__0_0.distcp"], named)


REMOVING = [abandon, remove_own]


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def raising(error: BaseException) -> Named:
    def named(directory: OpenDirectory, name: str) -> Iterable[str]:
        raise error

    return named


def no_names(*_: object) -> Any:
    return [1]


@pytest.mark.parametrize("remove", REMOVING)
@pytest.mark.parametrize(
    ("named", "match"),
    [
        (raising(OSError(5, "bad", os.fsdecode(b"odd\xff"))), "bad: 'odd"),
        (raising(ValueError("odd\udcff")), "odd\udcff"),
        (raising(ValueError("odd\ud800")), "ValueError"),
        (raising(Unspeakable()), "Unspeakable"),
        (no_names, "cast"),
    ],
)
def test_a_failing_callback_is_warned_of_and_no_file_is_removed(
    directory: OpenDirectory, remove: Callable[..., None], named: Named, match: str
) -> None:
    with pytest.warns(UserWarning, match=match) as warned:
        remove(directory, named)
    assert str(warned[0].message).startswith(f"unused files are left in {directory.path}: ")
    assert sorted(directory.names()) == [".metadata", "__0_0.distcp"]


@pytest.mark.parametrize("error", [ValueError("odd\udcff"), Unspeakable()], ids=["odd", "no text"])
def test_an_error_of_the_callback_is_raised(directory: OpenDirectory, error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        _core.remove_leftovers(directory, raising(error))
    assert raised.value is error


@pytest.mark.parametrize("remove", REMOVING)
def test_the_callback_can_keep_its_directory(
    directory: OpenDirectory, remove: Callable[..., None]
) -> None:
    kept: list[OpenDirectory] = []

    def named(opened: OpenDirectory, name: str) -> Iterable[str]:
        kept.append(opened)
        return ["__0_0.distcp"]

    remove(directory, named)
    gc.collect()
    (found,) = kept
    assert found.path == directory.path
    assert found.identity() == directory.identity()
    assert directory.try_lock_exclusive(), "it keeps the lock of the lease"


def test_an_interrupt_takes_precedence_over_the_error_of_the_commit(
    directory: OpenDirectory,
) -> None:
    lease = _core.DirectoryLease(directory, None, 1.0)
    with (
        pytest.warns(UserWarning, match="unused files are left in .*: KeyboardInterrupt"),
        pytest.raises(KeyboardInterrupt) as raised,
    ):
        lease.commit(b"new", [], True, False, raising(KeyboardInterrupt()))
    assert isinstance(raised.value.__context__, NotCommitted)


# The thread returns to Python while the interpreter ends.
ENDS = """
import ctypes, os, sys, threading
from torch_ckpt import _core
from torch_ckpt.checkpoint.directory import OpenDirectory
path, how = sys.argv[1:]
for name in ("__0_0.distcp", ".metadata"):
    open(os.path.join(path, name), "wb").close()
directory = OpenDirectory(path)
may_end, end = os.pipe()
inside = threading.Event()
def named(directory, name):
    inside.set()
    os.read(may_end, 1)
    return []
def wait(directory):
    other = OpenDirectory(path)
    assert other.try_lock_exclusive()
    inside.set()
    _core.DirectoryLease(directory, None, 30.0)
WAYS = {
    "abandon": lambda: _core.DirectoryLease(directory, None, 1.0).abandon(named),
    "commit": lambda: _core.DirectoryLease(directory, 0, 1.0).commit(b"", [], False, True, named),
    "own": lambda: _core.remove_own(directory, ["__0_0.distcp"], named),
    "leftovers": lambda: _core.remove_leftovers(directory, named),
    "wait": lambda: wait(directory),
}
threading.Thread(target=WAYS[how], daemon=True).start()
inside.wait()
class AtTheEnd:
    libc = ctypes.CDLL(None)
    def __del__(self, write=os.write, usleep=libc.usleep):
        write(end_fd, b"x")
        usleep(300_000)  # nobody can see what becomes of the thread
end_fd = end
sys.at_the_end = AtTheEnd()
"""


@pytest.mark.parametrize("how", ["abandon", "commit", "own", "leftovers", "wait"])
def test_a_callback_in_a_daemon_thread_at_exit_does_not_end_the_process(
    tmp_path: Path, how: str
) -> None:
    done = run_script(ENDS, tmp_path, how)
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
    ender = threading.Thread(target=lambda: (lease.abandon(), done.append("ended")))
    ender.start()
    assert not OpenDirectory(tmp_path).try_lock_exclusive()
    may_go_on.set()
    for thread in (remover, ender):
        thread.join(LIMIT)
    assert done == ["removed", "ended"]
    lease.remove(["__0_0.distcp"])
    assert done == ["removed", "ended"]
