"""A checkpoint to attack, a time limit, and the table at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.attacks import support


@pytest.fixture
def checkpoint(tmp_path: Path) -> support.Checkpoint:
    return support.Checkpoint(tmp_path)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.timeout(60))
            item.add_marker(pytest.mark.filterwarnings("ignore"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["attacks"] = support.TABLE


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Adds the table of a pytest-xdist worker."""
    for attack, row in getattr(node, "workeroutput", {}).get("attacks", {}).items():
        support.TABLE.setdefault(attack, {}).update(row)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not support.TABLE:
        return
    terminalreporter.section("attacks")
    width = max(map(len, support.TABLE))
    for attack, row in sorted(support.TABLE.items()):
        ours, stock = row.get("ours", "-"), row.get("stock", "-")
        terminalreporter.write_line(f"{attack:{width}}  ours: {ours:40}  stock: {stock}")
    terminalreporter.write_line(support.summary())
    support.write_results()
