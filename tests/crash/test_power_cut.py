"""Power cuts right after a save is reported as successful, and during saves.

A reported checkpoint survives. After a cut during a save, the complete old or new checkpoint
exists. The same cuts of stock torch are counted.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any

import pytest

from tests.crash.disks import KINDS, Disk, Workshop, skip_without, workshop
from tests.crash.savers import (
    TIMEOUT_SECONDS,
    Savers,
    engine_of,
    load_outcome,
    save_and_cut,
    save_only,
    savers,
)
from tests.crash.tally import TORTURE, Tally

pytestmark = pytest.mark.full

#: The old step, the new one, and a new one whose files have another layout.
OLD, NEW, GROWN = 1, 2, 12


@pytest.fixture(scope="module")
def tally(request: pytest.FixtureRequest) -> Tally:
    return Tally("powercut", "power cuts", "cuts", "lost").joined(request.config)


class Rig:
    """Disks, and processes that save on them, reused between cases."""

    def __init__(self, shop: Workshop) -> None:
        self.shop = shop
        self._groups: dict[int, Savers] = {}
        self._with_old: dict[tuple[str, str, int], Disk] = {}

    def group(self, ranks: int) -> Savers:
        group = self._groups.get(ranks)
        if group is None or not group.alive:
            if group is not None:
                group.kill()
            self._groups[ranks] = Savers(ranks)
        return self._groups[ranks]

    def disk(self, kind: str, engine: str, ranks: int, *, old: bool) -> Disk:
        """Creates an unmounted disk, with a synced checkpoint of step OLD if ``old``."""
        if not old:
            return self.shop.disk(kind)
        key = (kind, engine, ranks)
        if key not in self._with_old:
            disk = self.shop.disk(kind)
            disk.mount()
            way = "stock dcp.save" if engine == "stock" else "dcp.save"
            errors = self.group(ranks).do(save_only, way, OLD, disk.point / "ck", {})
            assert errors == [""] * ranks
            disk.unmount()
            self._with_old[key] = disk
        return self.shop.disk(kind, like=self._with_old[key])

    def load_after_cut(self, disk: Disk, engine: str, place: str, ranks: int) -> str:
        """Mounts the disk again. Returns the outcome of a load, and deletes the disk."""
        disk.unmount()
        disk.mount()
        try:
            return load_outcome(disk.point / place, engine, [OLD, NEW, GROWN], ranks)
        finally:
            disk.unmount()
            disk.image.unlink()

    def close(self) -> None:
        for group in self._groups.values():
            group.kill()


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with workshop() as shop:
        rig = Rig(shop)
        try:
            yield rig
        finally:
            rig.close()


# --- the cut itself ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_loses_only_the_rename_that_was_not_synced(rig: Rig, kind: str) -> None:
    skip_without(kind)
    disk = rig.shop.disk(kind)
    disk.mount()
    for name in ("synced", "not synced"):
        directory = disk.point / name
        directory.mkdir()
        (directory / "file.tmp").write_bytes(b"contents")
        disk.sync()
        (directory / "file.tmp").rename(directory / "file")
        if name == "synced":
            fd = os.open(directory, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
    disk.cut()
    disk.unmount()
    disk.mount()
    assert (disk.point / "synced" / "file").read_bytes() == b"contents"
    assert [path.name for path in (disk.point / "not synced").iterdir()] == ["file.tmp"]
    disk.unmount()


# --- reported saves ------------------------------------------------------------------------------

OUR_WAYS = ("torch_ckpt.save", "dcp.save", "torch_ckpt.async_save", "dcp.async_save")
# Stock torch is only counted; one way suffices to show that the cuts happen at the right moment.
STOCK_WAYS = ("stock dcp.save", "stock dcp.async_save")[: 2 if TORTURE else 1]
CASES = {
    "first": NEW,
    "first, nested": NEW,
    "overwrite": NEW,
    "overwrite, other layout": GROWN,
}


#: Number of trials of each case.
ROUNDS = 3 if TORTURE else 1


def _combinations(ways: tuple[str, ...]) -> list[Any]:
    """Returns all combinations, or enough for each pair of values of two columns."""
    columns = [tuple(KINDS), tuple(CASES), ways, (1, 2)]
    places = itertools.product(*(range(len(column)) for column in columns), range(ROUNDS))
    found = []
    for *place, number in places:
        kind, case, way, ranks = place
        if TORTURE or (kind, ranks) == ((case + way) % 2, (case // 2 + way) % 2):
            values = [column[i] for column, i in zip(columns, place, strict=True)]
            name = "-".join(map(str, [*values, number]))
            found.append(pytest.param(*values, id=name))
    return found


@pytest.mark.parametrize(("kind", "case", "way", "ranks"), _combinations(OUR_WAYS))
def test_a_reported_save_survives_a_power_cut(
    rig: Rig, tally: Tally, kind: str, case: str, way: str, ranks: int
) -> None:
    skip_without(kind)
    outcome = _cut_after_save(rig, kind, case, way, ranks, {})
    right = outcome == f"step {CASES[case]}"
    tally.add(
        "torch_ckpt",
        right,
        test="reported save",
        file_system=kind,
        case=case,
        way=way,
        ranks=ranks,
        outcome=outcome,
    )
    assert right, f"the save was reported, but the power cut left {outcome}"


@pytest.mark.torture
@pytest.mark.parametrize(("kind", "case", "way", "ranks"), _combinations(STOCK_WAYS))
def test_reported_saves_of_stock_torch_are_counted(
    rig: Rig, tally: Tally, kind: str, case: str, way: str, ranks: int
) -> None:
    skip_without(kind)
    outcome = _cut_after_save(rig, kind, case, way, ranks, {})
    tally.add(
        "stock",
        outcome == f"step {CASES[case]}",
        test="reported save",
        file_system=kind,
        case=case,
        way=way,
        ranks=ranks,
        outcome=outcome,
    )


@pytest.mark.parametrize("way", ["torch_ckpt.save", "torch_ckpt.async_save", "stock dcp.save"])
@pytest.mark.parametrize("case", ["first", "overwrite, other layout"])
@pytest.mark.parametrize("kind", KINDS)
def test_without_sync_files_a_power_cut_may_lose_a_save_but_leaves_no_mixture(
    rig: Rig, tally: Tally, kind: str, case: str, way: str
) -> None:
    skip_without(kind)
    outcome = _cut_after_save(rig, kind, case, way, 1, {"sync_files": False})
    tally.add(
        engine_of(way),
        None,
        test="reported save with sync_files=False",
        file_system=kind,
        case=case,
        way=way,
        ranks=1,
        outcome=outcome,
    )
    if engine_of(way) == "torch_ckpt":
        assert outcome != "mixture"


def _cut_after_save(
    rig: Rig, kind: str, case: str, way: str, ranks: int, options: dict[str, Any]
) -> str:
    """Saves, and cuts the power as soon as the save is reported on a rank."""
    engine = engine_of(way)
    disk = rig.disk(kind, engine, ranks, old=case.startswith("overwrite"))
    place = "a/b/ck" if case == "first, nested" else "ck"
    disk.mount()
    if case == "first":
        # A directory that another program has created and not synced.
        (disk.point / place).mkdir()
    errors = rig.group(ranks).do(
        save_and_cut, way, CASES[case], disk.point / place, options, disk.point
    )
    # The cut may fail the other rank in its last operations.
    assert "" in errors, f"no rank's save was reported: {errors}"
    return rig.load_after_cut(disk, engine, place, ranks)


# --- cuts during a save --------------------------------------------------------------------------

_RENAMES = "rename,renameat,renameat2"
_REMOVALS = "unlink,unlinkat"
_SIZES = "ftruncate,fallocate"

#: Threads whose calls are counted: each thread separately, including the engine's, or only the
#: thread that saves and commits.
EVERY_THREAD, MAIN_THREAD = "every thread", "main thread"

#: The system call of a save after which the process is stopped and the power is cut.
MOMENTS = {
    "a data file's first bytes have been written": (EVERY_THREAD, "pwrite64", 1),
    "a data file has been synced": (EVERY_THREAD, "fsync", 1),
    "the metadata has been synced": (MAIN_THREAD, "fsync", 1),
    "its directory's parent has been synced": (MAIN_THREAD, "fsync", 2),
    "the metadata has its name": (MAIN_THREAD, _RENAMES, 1),
    "the first old file has been removed": (MAIN_THREAD, _REMOVALS, 1),
}

#: All calls by which a save changes the disk.
SWEPT = ("pwrite64,write", "fsync,fdatasync", _RENAMES, _REMOVALS, "openat", _SIZES)

#: An asynchronous save commits in a background thread, so all threads count. The engine's threads
#: set the sizes of data files.
SWEPT_SAVES = [
    (way, threads, calls)
    for way, threads in (
        ("torch_ckpt.save", EVERY_THREAD),
        ("torch_ckpt.save", MAIN_THREAD),
        ("dcp.save", MAIN_THREAD),
        ("torch_ckpt.async_save", EVERY_THREAD),
    )
    for calls in SWEPT
    if threads == EVERY_THREAD or calls != _SIZES
]

#: More calls of one kind than a thread of a save makes.
MOST_CALLS = 200

#: Limit for all calls of one kind.
LONGEST_SECONDS = 1200


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_during_an_overwriting_save_leaves_the_old_or_the_new_checkpoint(
    rig: Rig, tally: Tally, kind: str, moment: str
) -> None:
    skip_without(kind)
    threads, calls, nth = MOMENTS[moment]
    outcome = _cut_at_call(rig, tally, kind, "torch_ckpt.save", threads, calls, nth)
    assert outcome is not None, f"the save made no {nth} calls of {calls}"
    assert outcome in (f"step {OLD}", f"step {NEW}")
    if calls == _REMOVALS:
        assert outcome == f"step {NEW}", "old files were deleted before the commit was durable"


@pytest.mark.timeout(LONGEST_SECONDS)
@pytest.mark.skipif(not TORTURE, reason="TORCH_CKPT_TORTURE tries every call")
@pytest.mark.parametrize(("way", "threads", "calls"), SWEPT_SAVES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_after_any_call_of_a_save_leaves_the_old_or_the_new_checkpoint(
    rig: Rig, tally: Tally, kind: str, way: str, threads: str, calls: str
) -> None:
    skip_without(kind)
    wrong = []
    for nth in range(1, MOST_CALLS):
        outcome = _cut_at_call(rig, tally, kind, way, threads, calls, nth)
        if outcome is None:
            break
        if outcome not in (f"step {OLD}", f"step {NEW}"):
            wrong.append(f"after call {nth} of {calls}: {outcome}")
    else:
        raise AssertionError(f"a thread of the save made {MOST_CALLS} calls of {calls}")
    assert nth > 1, f"the save made no call of {calls}"
    assert not wrong, "\n".join(wrong)


STOCK_MOMENTS = [("fsync", 1), ("openat", 2), ("write", 3), (_RENAMES, 1)][: 4 if TORTURE else 1]


@pytest.mark.torture
@pytest.mark.parametrize(("calls", "nth"), STOCK_MOMENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_cuts_during_overwriting_saves_of_stock_torch_are_counted(
    rig: Rig, tally: Tally, kind: str, calls: str, nth: int
) -> None:
    skip_without(kind)
    assert _cut_at_call(rig, tally, kind, "stock dcp.save", EVERY_THREAD, calls, nth) is not None


def _cut_at_call(
    rig: Rig, tally: Tally, kind: str, way: str, threads: str, calls: str, nth: int
) -> str | None:
    """Cuts the power after a thread of an overwriting save has made its ``nth`` call of a kind.

    Returns:
        The outcome of a load; None if the save ended before, which must then be loadable.
    """
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    engine = engine_of(way)
    disk = rig.disk(kind, engine, 1, old=True)
    disk.mount()
    with savers() as group:
        # Exclude calls that a process makes only in its first save.
        warm_up = rig.shop.place / "warm-up"
        assert group.do(save_only, way, OLD, warm_up, {}) == [""]
        shutil.rmtree(warm_up)
        with _stopping_at(group.pids[0], threads, calls, nth) as tracer:
            group.begin(save_only, way, NEW, disk.point / "ck", {})
            reported = not _wait_until_stopped(tracer, group)
            if reported:
                assert group.end(0) == ""
            disk.cut()
            group.kill()
    outcome = rig.load_after_cut(disk, engine, "ck", 1)
    if reported:
        assert outcome == f"step {NEW}" or engine == "stock"
        return None
    tally.add(
        engine,
        outcome in (f"step {OLD}", f"step {NEW}"),
        test="cut amid a save",
        file_system=kind,
        case=f"overwrite, after call {nth} of {calls.split(',')[0]}, {threads}",
        way=way,
        ranks=1,
        outcome=outcome,
    )
    return outcome


@contextmanager
def _stopping_at(pid: int, threads: str, calls: str, nth: int) -> Iterator[subprocess.Popen[bytes]]:
    """Makes strace stop a process after one of its threads has made a call.

    The signal is sent when the call begins. None of the traced calls is interrupted by a signal, so
    the call completes and then the process stops.
    """
    command = ["strace", "-p", str(pid), "-e", f"trace={calls}"]
    if threads == EVERY_THREAD:
        command.append("-f")
    command += ["-e", f"inject={calls}:signal=STOP:when={nth}"]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        assert tracer.stderr is not None
        output = os.read(tracer.stderr.fileno(), 4096)
        while b"attached" not in output:
            more = os.read(tracer.stderr.fileno(), 4096)
            if not more and b"Operation not permitted" in output:
                pytest.skip(f"strace may not attach here: {output.decode().strip()}")
            assert more, f"strace does not attach: {output.decode()}"
            output += more
        yield tracer
    finally:
        tracer.kill()
        tracer.communicate()


def _wait_until_stopped(tracer: subprocess.Popen[bytes], group: Savers) -> bool:
    """Waits until the traced process is stopped or has ended its work. Returns True if stopped."""
    assert tracer.stderr is not None
    output = b""
    while not re.search(rb"stopped by SIGSTOP", output):
        ready = wait([tracer.stderr, group.connection(0)], TIMEOUT_SECONDS)
        assert ready, f"the save neither ends nor stops; output of strace:\n{output.decode()}"
        if tracer.stderr in ready:
            more = os.read(tracer.stderr.fileno(), 1 << 16)
            assert more, f"strace has ended:\n{output.decode()}"
            output += more
        elif group.connection(0) in ready:
            return False
    return True
