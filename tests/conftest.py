"""Fixtures and settings of all tests: marks, a time limit, temporary directories of several
kinds."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# Must be set before torch is imported. OpenMP's threads spin while they wait for each other. If
# other processes use the cores, work on small tensors is ten times slower with two threads than
# with one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# An importing module comes after the imported ones, or their assertions would not be rewritten.
pytest_plugins = [
    "tests.gates",
    "tests.async_saves",
    "tests.async_calls",
    "tests.background_saves",
    "tests.commands",
    "tests.interposed",
    "tests.managers",
    "tests.rank_threads",
    "tests.ranks",
    "tests.object_steps",
    "tests.sweeps",
]

ROOT = Path(__file__).resolve().parent.parent

#: Seconds that each file of tests took when ``make durations`` last ran.
DURATIONS = Path(__file__).parent / "durations.json"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-durations",
        action="store_true",
        help="write how long each file took to tests/durations.json",
    )


def pytest_configure(config: pytest.Config) -> None:
    # torch logs a dozen lines for each save and load, and pytest would print all for each failure.
    config.option.log_level = config.option.log_level or "WARNING"
    config.addinivalue_line("markers", "large: needs several GiB of disk and memory")
    config.addinivalue_line("markers", "full: run by make test-full, and not by make test")
    config.addinivalue_line("markers", "torture: run by make torture alone")
    config.addinivalue_line(
        "markers",
        "alone: measures memory, bandwidth or time, or uses what the machine has once; "
        "make py-test runs nothing beside it",
    )
    # torch warns of this at each save and load without a process group.
    config.addinivalue_line("filterwarnings", "ignore:torch.distributed is disabled")
    config.addinivalue_line("filterwarnings", "ignore:.*support is experimental")
    if config.pluginmanager.hasplugin("hypothesispytest"):
        from hypothesis import HealthCheck, settings

        # The same examples in each run, however slow the machine is.
        settings.register_profile(
            "tests",
            deadline=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
        )
        settings.load_profile("tests")


@pytest.hookimpl(tryfirst=True)  # Before -m selects by mark.
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # pytest must import the modules in pytest_plugins.
    from tests.sweeps import TORTURE

    for item in items:
        if item.get_closest_marker("alone") and not item.get_closest_marker("full"):
            raise pytest.UsageError(f"{item.nodeid}: mark it full, too: lane 1 runs no tests alone")
    left_out = [item for item in items if item.get_closest_marker("torture") and not TORTURE]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("torture")]
    if hasattr(config, "workerinput"):
        # pytest-xdist starts the files in this order, and the last ones to end should be short.
        recorded: dict[str, float] = json.loads(DURATIONS.read_text())
        items.sort(key=lambda item: recorded.get(_file_of(item.nodeid), 0), reverse=True)


def _file_of(nodeid: str) -> str:
    return nodeid.split("::")[0]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the seconds for each directory if --durations is given, and records them by file."""
    config = terminalreporter.config
    files: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                files[_file_of(report.nodeid)] += report.duration
    if config.option.durations:
        directories: Counter[str] = Counter()
        for file, spent in files.items():
            directories[os.path.dirname(file)] += spent
        terminalreporter.section("seconds by directory")
        for directory, spent in directories.most_common():
            terminalreporter.write_line(f"{spent:8.1f}  {directory}")
    if config.option.record_durations:
        recorded = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
        recorded |= {file: round(spent, 1) for file, spent in files.items()}
        present = {file: recorded[file] for file in sorted(recorded) if (ROOT / file).exists()}
        DURATIONS.write_text(json.dumps(present, indent=0) + "\n")


@pytest.fixture(scope="session", autouse=True)
def control_c() -> Iterator[None]:
    """Restores the SIGINT handler: shells start background jobs with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def without_warnings() -> Iterator[None]:
    """Fails a test that causes a warning which the test does not expect."""
    from tests.support import no_warnings

    with no_warnings():
        yield


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """Temporary directory that is deleted after its test, for tests that write GiBs."""
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """File system of 8 MiB."""
    with _mounted(tmp_path / "small", "tmpfs", "-o", "size=8m") as mount_point:
        yield mount_point


@pytest.fixture
def ram_disk(tmp_path: Path) -> Iterator[Path]:
    """File system without direct I/O that does not report its free space."""
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
