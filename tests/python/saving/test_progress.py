"""The progress bar of ``progress=True``: redrawn on a terminal, one line in a log."""

from __future__ import annotations

import io
import re

import pytest

from tests.support import Terminal
from torch_ckpt._base.progress import Progress, reporting


@pytest.fixture(autouse=True)
def _terminal_of_100_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")


def draw(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, title: str = "save x") -> str:
    """Draws the progress of a save of 2 MB that reports twice."""
    monkeypatch.setattr("sys.stderr", stream)
    with reporting(True, title, 0, 2_000_000, seconds_between=0.0) as report:
        assert report is not None
        for done in (500_000, 2_000_000):
            report(Progress(2_000_000, done, done))
    return stream.getvalue()


def test_a_terminal_shows_a_bar_with_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    _, *lines = draw(monkeypatch, Terminal()).split("\r")
    rate = r"[0-9.]+ [kMGT]?B/s"
    patterns = [
        rf"save x: #{{5}}-{{15}} 25% of 2\.0 MB, {rate}, [0-9]+ s left\x1b\[K",
        rf"save x: #{{20}} 100% of 2\.0 MB, {rate}\x1b\[K",
        rf"save x: #{{20}} 100% of 2\.0 MB, {rate}\x1b\[K\n",
    ]
    assert len(lines) == len(patterns)
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(pattern, line)


def test_the_bar_is_coloured_unless_no_color_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[32m" not in draw(monkeypatch, Terminal())
    monkeypatch.delenv("NO_COLOR")
    assert "\x1b[32m#####\x1b[0m-" in draw(monkeypatch, Terminal())


@pytest.mark.parametrize("columns", [40, 60, 80, 100])
@pytest.mark.parametrize("title", ["save x", "save " + "0123456789" * 10])
def test_the_line_is_shorter_than_the_width_of_the_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: int, title: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for line in draw(monkeypatch, Terminal(), title).split("\r"):
        assert len(line.rstrip("\n").removesuffix("\x1b[K")) < columns


@pytest.mark.parametrize("stream", [io.StringIO, Terminal], ids=["log", "dumb terminal"])
def test_a_log_gets_one_line_at_the_end(
    monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO]
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    text = draw(monkeypatch, stream())
    assert re.fullmatch(r"save x: 100% of 2\.0 MB, [0-9.]+ [kMGT]?B/s\n", text)


def test_control_characters_in_the_title_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\\x1b[2J" in draw(monkeypatch, io.StringIO(), "load \x1b[2J")


def test_a_closed_standard_error_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    with reporting(True, "save x", 0, 1) as report:
        assert report is not None
        stream.close()
        report(Progress(1, 1, 1))


def test_ranks_other_than_0_draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with reporting(True, "save x", 1, 1) as report:
        assert report is None
