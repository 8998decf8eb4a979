"""``torch-ckpt doctor``: measurements, conclusions, and the removal of its files."""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.commands import Run
from tests.fault_hooks import at_fault_points, before
from torch_ckpt._base.formatting import plural
from torch_ckpt._base.system import Mount, find_mount, parse_mount
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.cli import doctor
from torch_ckpt.cli.doctor import (
    THREADS,
    check_assumptions,
    choose_options,
    diagnose,
    measure_alignment,
)
from torch_ckpt.stores.probe import Check

SMALL = 1 << 20


def states(checks: list[Check]) -> dict[int, str]:
    return {int(check.what.partition(".")[0]): check.state for check in checks}


# --- an existing directory -----------------------------------------------------------------------


def test_a_directory_is_measured_and_keeps_its_contents(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("stays")
    report = diagnose(tmp_path, measured_bytes=SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    is_direct = report.facts["direct_io"] != "no"
    assert [*report.measured] == ["fsync_ms", "commit_ms"] + [
        f"{kind}{mode}_{plural(threads, 'thread').replace(' ', '_')}_bytes_per_second"
        for mode in (("", "_direct") if is_direct else ("",))
        for threads in THREADS
        for kind in ("write", "read")
    ]
    assert min(report.measured.values()) > 0
    assert report.facts["free_bytes"] > 0
    assert {states(report.checks)[number] for number in (2, 6)} == {"holds"}


def test_an_interruption_leaves_no_file(tmp_path: Path) -> None:
    found: list[list[Path]] = []

    def interrupt() -> None:
        found.append(list(tmp_path.iterdir()))
        os.kill(os.getpid(), signal.SIGINT)

    with before("pread", interrupt), pytest.raises(KeyboardInterrupt):
        diagnose(tmp_path, measured_bytes=SMALL)
    assert list(map(len, found)) == [1]
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_direct_io_and_space_counts_is_measured(ram_disk: Path) -> None:
    report = diagnose(ram_disk, measured_bytes=SMALL)
    assert report.facts["direct_io"] == "no"
    assert not any("direct" in name for name in report.measured)
    assert report.facts["free_bytes"] is None


def test_the_alignment_is_the_smallest_one_that_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reading(_fd: int, targets: list[memoryview], offset: int) -> int:
        if offset % 4096:
            raise OSError(22, "Invalid argument")
        return len(targets[0])

    # Simulate a disk with sectors of 4096 bytes.
    monkeypatch.setattr(os, "O_DIRECT", 0)
    monkeypatch.setattr(os, "preadv", reading)
    assert measure_alignment(str(tmp_path)) == 4096


def test_locks_that_do_not_exclude_are_reported_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unlocked(OpenDirectory):
        def try_lock_exclusive(self) -> bool:
            return True

    # On one machine flock excludes on every file system, so simulate a failure.
    monkeypatch.setattr(doctor, "OpenDirectory", Unlocked)
    report = diagnose(tmp_path, measured_bytes=SMALL)
    assert states(report.checks)[6] == "fails"
    assert not report.ok


def test_an_exclusive_rename_that_replaces_a_file_is_detected(tmp_path: Path) -> None:
    def make_way(operation: str, path: str) -> None:
        if operation == "rename" and path.endswith("/exclusive"):
            Path(path).unlink(missing_ok=True)

    with at_fault_points(make_way):
        report = diagnose(tmp_path, measured_bytes=SMALL)
    assert states(report.checks)[2] == "fails"


def test_too_few_bytes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 32768"):
        diagnose(tmp_path, measured_bytes=1000)


# --- mounts --------------------------------------------------------------------------------------


def test_a_line_of_mountinfo_is_parsed() -> None:
    line = r"36 35 98:0 /mnt1 /mnt\040two rw,noatime master:1 - ext3 /dev/root rw,barrier=0" + "\n"
    assert parse_mount(line) == Mount("/mnt two", "ext3", "/dev/root", "rw,noatime,barrier=0")


@pytest.mark.parametrize(
    ("path", "file_system"),
    [
        ("/", "ext4"),
        ("/data", "xfs"),
        ("/data/run/1", "xfs"),
        ("/database", "ext4"),
        ("/data/scratch/x", "tmpfs"),
    ],
)
def test_a_path_belongs_to_the_last_of_the_deepest_mounts(path: str, file_system: str) -> None:
    mounts = [
        Mount("/", "ext4", "", ""),
        Mount("/data", "nfs", "", ""),
        Mount("/data/scratch", "tmpfs", "", ""),
        Mount("/data", "xfs", "", ""),
    ]
    assert find_mount(path, mounts).file_system == file_system


# --- conclusions ---------------------------------------------------------------------------------

RATES = st.lists(st.floats(1.0, 1e10), min_size=len(THREADS), max_size=len(THREADS))


@given(buffered=RATES, direct=RATES)
def test_the_options_use_the_fewest_threads_that_are_about_as_fast_as_any(
    buffered: list[float], direct: list[float]
) -> None:
    rates = {(False, n): rate for n, rate in zip(THREADS, buffered, strict=True)}
    rates |= {(True, n): rate for n, rate in zip(THREADS, direct, strict=True)}
    found = {("read", is_direct, n): rate for (is_direct, n), rate in rates.items()}
    others = {("write", True, n): 1e11 for n in THREADS}
    options = choose_options("read", found | others)
    is_direct, threads = options["direct_io"] == "auto", options["thread_count"]
    of_mode = [rates[is_direct, n] for n in THREADS]
    assert rates[is_direct, threads] >= 0.9 * max(of_mode)
    assert max(of_mode) >= 0.9 * max(rates.values())
    assert all(rates[is_direct, n] < 0.9 * max(of_mode) for n in THREADS if n < threads)


def test_without_direct_io_measurements_the_engine_chooses() -> None:
    found = {("write", False, n): 1e9 for n in THREADS}
    assert choose_options("write", found) == {"thread_count": 1, "direct_io": "auto"}


@pytest.mark.parametrize(
    ("file_systems", "options", "expected"),
    [
        (["ext4", "xfs"], "rw", {}),
        (["tmpfs"], "rw", {1: "fails", 2: "unknown", 3: "fails"}),
        (["ext4"], "rw,nobarrier,noatime", {1: "fails"}),
        (["ext4"], "rw,barrier=0,noatime", {1: "fails"}),
        (["nfs4", "lustre", "fuse.sshfs", "9p"], "rw", dict.fromkeys((1, 2, 3, 5, 6), "unknown")),
    ],
    ids=["tested", "in memory", "without barriers", "without barrier", "shared"],
)
def test_assumptions_hold_only_on_tested_file_systems(
    file_systems: list[str], options: str, expected: dict[int, str]
) -> None:
    for file_system in file_systems:
        is_local = file_system in ("ext4", "xfs", "tmpfs")
        checks = check_assumptions(
            file_system, options, is_local=is_local, renames=True, locks=True
        )
        found = states(checks)
        assert found == dict.fromkeys((1, 2, 3, 5, 6), "holds") | expected


# --- the command ---------------------------------------------------------------------------------


def test_the_command_recommends_options(tmp_path: Path, run: Run) -> None:
    text = run("doctor", tmp_path, "--size", "1MiB", code=None)
    assert run.code == (1 if " fails " in text else 0)
    assert text.startswith(f"{tmp_path}\nCHECK ")
    assert "FileSystemWriter(..., thread_count=" in text
    assert "FileSystemReader(..., thread_count=" in text
    document = run.json("doctor", tmp_path, "--size", "1MiB", code=run.code)
    assert document["path"] == str(tmp_path)
    assert document["ok"] == all(check["state"] != "fails" for check in document["checks"])


def test_a_file_is_refused_by_its_name(tmp_path: Path, run: Run) -> None:
    (tmp_path / "file").touch()
    error = run.refused("doctor", tmp_path / "file")
    assert error.startswith(f"torch-ckpt: {tmp_path}/file: this is a file. Pass the directory")


def test_a_missing_directory_and_a_size_larger_than_the_free_space_are_refused(
    tmp_path: Path, run: Run
) -> None:
    assert "No such file or directory" in run("doctor", tmp_path / "none", code=2)
    assert "choose a smaller size" in run("doctor", tmp_path, "--size", "1000000TB", code=2)
    assert list(tmp_path.iterdir()) == []
