"""What all tests share: marks, a limit for hangs, and temporary directories of several kinds."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# Before torch is imported. OpenMP's threads spin while they wait for each other: where other
# processes keep the cores busy, work on small tensors takes ten times as long with two as with one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Who imports another one comes after it, or its assertions would not be rewritten.
pytest_plugins = [
    "tests.gates",
    "tests.async_saves",
    "tests.async_calls",
    "tests.background_saves",
    "tests.children",
    "tests.interposed",
    "tests.managers",
    "tests.remote_steps",
    "tests.sweeps",
]

# A hang is a failure. The slowest test here takes well under a minute, and machines differ.
TIMEOUT_SECONDS = 300


def pytest_configure(config: pytest.Config) -> None:
    # torch logs a dozen lines for each save and load, and a failure would show them all.
    config.option.log_level = config.option.log_level or "WARNING"
    config.addinivalue_line("markers", "large: needs several GiB of disk and memory")
    config.addinivalue_line("markers", "torture: run by make torture alone")
    config.addinivalue_line(
        "markers",
        "alone: measures memory, bandwidth or time, or uses what the machine has once; "
        "make py-test runs nothing beside it",
    )
    # torch says so at each save and load that runs without a process group.
    config.addinivalue_line("filterwarnings", "ignore:torch.distributed is disabled")
    config.addinivalue_line("filterwarnings", "ignore:.*support is experimental")


@pytest.hookimpl(tryfirst=True)  # Before -m chooses by the marks.
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # What pytest_plugins names is to be imported by pytest.
    from tests.sweeps import TORTURE

    has_timeouts = config.pluginmanager.hasplugin("timeout")
    for item in items:
        if has_timeouts and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_SECONDS))
    left_out = [item for item in items if item.get_closest_marker("torture") and not TORTURE]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("torture")]


def _directory_of(nodeid: str) -> str:
    return nodeid.split("::")[0].split("/")[-2]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Seconds by directory, where the slowest tests are asked for."""
    if not terminalreporter.config.option.durations:
        return
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[_directory_of(report.nodeid)] += report.duration
    terminalreporter.section("seconds by directory")
    for directory, spent in seconds.most_common():
        terminalreporter.write_line(f"{spent:8.1f}  tests/{directory}")


@pytest.fixture(scope="session", autouse=True)
def control_c() -> Iterator[None]:
    """Shells start jobs in the background with SIGINT ignored, and Python then leaves it so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A temporary directory that does not outlive its test: for those who fill it with GiBs."""
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    with _mounted(tmp_path / "small", "tmpfs", "-o", "size=8m") as mount_point:
        yield mount_point


@pytest.fixture
def ram_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that has no direct I/O, and does not say how many bytes are free."""
    with _mounted(tmp_path / "ram", "ramfs") as mount_point:
        yield mount_point


@contextmanager
def _mounted(mount_point: Path, *kind: str) -> Iterator[Path]:
    mount_point.mkdir()
    command = ["mount", "-t", *kind, "none", str(mount_point)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"mounting a file system takes root: {mounted.stderr.strip()}")
    yield mount_point
    subprocess.run(["umount", "-l", str(mount_point)], check=True)
