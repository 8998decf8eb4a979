"""Saves and loads without threads or memory, which succeed or raise an error with advice.

Environment variables:
    TORCH_CKPT_TORTURE: try every number of threads from 0 to 30; if unset, some of them.
"""

from __future__ import annotations

import errno
import os
import resource
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ckpt
from tests.forked import Answering
from tests.sweeps import TORTURE

#: A user without other processes.
ORDINARY_USER = 61_000 + os.getpid() % 4_000

SECONDS = 120

#: The smallest number of threads that the engine wants for a save, load or verification, and the
#: largest number that it wants for the calls of this file.
ENGINE_THREADS = 4
MOST_ENGINE_THREADS = 16
MORE_THAN_WANTED = 400

COUNTS = [*(range(31) if TORTURE else (0, 1, 2, 5, 30)), MORE_THAN_WANTED]

KIB, MIB = 1 << 10, 1 << 20

#: Address space beyond that of the process, in bytes. With less than 64 KiB a Python thread may get
#: no frame, and ``threading.Thread.start`` then waits forever (CPython 3.11).
ROOM = [64 * KIB, 3 * MIB, 9 * MIB, 20 * MIB, 200 * MIB]
if TORTURE:
    ROOM += [
        256 * KIB,
        MIB,
        *(mib * MIB for mib in (*range(4, 9), *range(10, 20), *range(24, 80, 8))),
    ]

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
]


def state() -> dict[str, Any]:
    return {f"t{i}": torch.full((3000,), float(i)) for i in range(20)}


@dataclass(frozen=True)
class Ending:
    """Result of work in a child.

    Attributes:
        error: the error of the work with its traceback; empty if it succeeded.
        errno: errno of the error; None if it has none.
        out_of_memory: True if the error is a ``MemoryError``.
        warned: number of warnings about the limit on threads.
        afterwards: error of a save and a load after the limit was lifted; empty if they succeeded.
    """

    error: str
    errno: int | None
    out_of_memory: bool
    warned: int
    afterwards: str


def describe(error: BaseException | None) -> str:
    return "" if error is None else "".join(traceback.format_exception(error))


def catch(body: Callable[[], None]) -> Exception | None:
    try:
        body()
    except Exception as error:
        return error
    return None


def run_limited(
    work: Callable[[Path], None], directory: Path, limit: Callable[[], AbstractContextManager[None]]
) -> Ending:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with limit():
            error = catch(lambda: work(directory))
        warned = sum("ulimit -u" in str(warning.message) for warning in caught)

    def again() -> None:
        save(directory, "again")
        load(directory, "again")

    return Ending(
        describe(error),
        getattr(error, "errno", None),
        isinstance(error, MemoryError),
        warned,
        describe(catch(again)),
    )


def run_in_child(
    work: Callable[[Path], None], directory: Path, limit: Callable[[], AbstractContextManager[None]]
) -> Ending:
    """Runs ``work`` in a forked child within the context manager ``limit()``."""

    def limited(_send: object) -> Ending:
        # libgomp ends the process if it gets no thread.
        torch.set_num_threads(1)
        return run_limited(work, directory, limit)

    child = Answering(limited)
    try:
        ending = child.answer(SECONDS)
        assert isinstance(ending, Ending), "the process has died"
        return ending
    finally:
        child.kill()


# --- limits ---------------------------------------------------------------------------------------


@contextmanager
def limited(kind: int, most: int) -> Iterator[None]:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (hard, hard))


@contextmanager
def threads_of_the_user(count: int) -> Iterator[None]:
    """Changes to an ordinary user with a limit of ``count`` more threads."""
    os.setgroups([])
    os.setuid(ORDINARY_USER)
    with limited(resource.RLIMIT_NPROC, 1 + count):
        yield


@contextmanager
def address_space(room: int) -> Iterator[None]:
    """Limits the address space to ``room`` bytes more than the process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    with limited(resource.RLIMIT_AS, pages * resource.getpagesize() + room):
        yield


@contextmanager
def threads_of_the_group(group: Path, count: int) -> Iterator[None]:
    """Enters the control group, which may have ``count`` more threads."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
    (group / "pids.max").write_text(str(1 + count))
    try:
        yield
    finally:
        (group / "pids.max").write_text("max")


@pytest.fixture
def control_group() -> Iterator[Path]:
    """Creates a control group, of version 2 or 1, that can limit processes and threads."""
    reasons = []
    for parent in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/pids")):
        if not (parent / "cgroup.procs").exists():
            continue
        group = parent / f"torch_ckpt-{os.getpid()}"
        try:
            group.mkdir()
        except OSError as error:
            reasons.append(str(error))
            continue
        try:
            if (group / "pids.max").exists():
                yield group
                return
            reasons.append(f"{parent} does not limit processes")
        finally:
            with suppress(OSError):
                group.rmdir()
    pytest.skip("cannot create a control group: " + ("; ".join(reasons) or "none is mounted"))


# --- work -----------------------------------------------------------------------------------------


@pytest.fixture
def shared() -> Iterator[Path]:
    """Creates a directory of the ordinary user with a checkpoint."""
    # Not in tmp_path: pytest closes the directory of all sessions of root to other users.
    with tempfile.TemporaryDirectory(prefix="torch_ckpt-") as name:
        directory = Path(name)
        torch_ckpt.save(state(), directory / "there", no_dist=True)
        directory.chmod(0o755)
        os.chown(directory, ORDINARY_USER, ORDINARY_USER)
        yield directory


def save(directory: Path, name: str = "new") -> None:
    torch_ckpt.save(state(), directory / name, no_dist=True)


def load(directory: Path, name: str = "there") -> None:
    loaded = {name: torch.zeros_like(value) for name, value in state().items()}
    torch_ckpt.load(loaded, directory / name, no_dist=True)
    assert all(torch.equal(loaded[name], value) for name, value in state().items())


def verify(directory: Path) -> None:
    assert torch_ckpt.verify(directory / "there").ok


def async_save(directory: Path) -> None:
    torch_ckpt.async_save(state(), directory / "async", no_dist=True).result()


all_work = pytest.mark.parametrize("work", [save, load, verify, async_save])


def expect_work_with_threads(ending: Ending, work: Callable[[Path], None], count: int) -> None:
    """Asserts an error with advice if there was no thread, and success with at most one warning
    otherwise."""
    assert not ending.afterwards
    if work is async_save and ending.error:
        # The thread that could not be started may be one of Python.
        assert ending.errno == errno.EAGAIN or "can't start new thread" in ending.error
        assert count < MOST_ENGINE_THREADS
    elif count == 0:
        assert ending.errno == errno.EAGAIN, ending.error
        assert "ulimit -u" in ending.error
    else:
        assert not ending.error
        if count < ENGINE_THREADS:
            assert ending.warned == 1
        assert ending.warned <= (0 if count == MORE_THAN_WANTED else 1)


@pytest.mark.parametrize("count", COUNTS)
@all_work
def test_work_ends_with_few_threads_for_the_user(
    work: Callable[[Path], None], count: int, shared: Path
) -> None:
    ending = run_in_child(work, shared, partial(threads_of_the_user, count))
    expect_work_with_threads(ending, work, count)


@pytest.mark.parametrize("count", [0, 1, 7])
@all_work
def test_work_ends_with_few_threads_for_the_container(
    work: Callable[[Path], None], count: int, control_group: Path, shared: Path
) -> None:
    ending = run_in_child(work, shared, partial(threads_of_the_group, control_group, count))
    expect_work_with_threads(ending, work, count)


@pytest.mark.parametrize("room", ROOM)
@all_work
def test_work_ends_with_little_address_space(
    work: Callable[[Path], None], room: int, shared: Path
) -> None:
    ending = run_in_child(work, shared, partial(address_space, room))
    assert not ending.afterwards
    if ending.error:
        assert ending.out_of_memory or ending.errno in (errno.ENOMEM, errno.EAGAIN), ending.error
    assert ending.warned <= 1
