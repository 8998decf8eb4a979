"""What all tests share: marks, a limit for hangs, and temporary directories of several kinds."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest_plugins = ["tests.interposed", "tests.sweeps"]

# A hang is a failure. The slowest test here takes well under a minute, and machines differ.
TIMEOUT_SECONDS = 300


def pytest_configure(config: pytest.Config) -> None:
    # torch logs a dozen lines for each save and load, and a failure would show them all.
    config.option.log_level = config.option.log_level or "WARNING"
    config.addinivalue_line("markers", "large: needs several GiB of disk and memory")
    # torch says so at each save and load that runs without a process group.
    config.addinivalue_line("filterwarnings", "ignore:torch.distributed is disabled")
    config.addinivalue_line("filterwarnings", "ignore:.*support is experimental")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.pluginmanager.hasplugin("timeout"):
        return
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_SECONDS))


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
    mount_point = tmp_path / "small"
    mount_point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mount_point)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"mounting a tmpfs takes root: {mounted.stderr.strip()}")
    yield mount_point
    subprocess.run(["umount", "-l", str(mount_point)], check=True)
