"""The bar of ``progress=True``: redrawn on a terminal, one line in a log."""

from __future__ import annotations

import io

import pytest

from tests.support import Terminal
from torch_ckpt._base.progress import Progress, Reporter


def drawn(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, title: str = "save x") -> str:
    """What a save of 2 MB draws that is told of twice."""
    monkeypatch.setattr("sys.stderr", stream)
    with Reporter(True, title, 0, 2_000_000, seconds_between=0.0) as shown:
        for done in (500_000, 2_000_000):
            shown.update(Progress(2_000_000, done, done))
    return stream.getvalue()


def test_on_a_terminal_one_line_is_drawn_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    _, *lines = drawn(monkeypatch, Terminal()).split("\r")
    assert [line.partition(",")[0] for line in lines] == [
        "save x: 25% of 2.0 MB",
        "save x: 100% of 2.0 MB",
        "save x: 100% of 2.0 MB",
    ]
    assert lines[-1].endswith("\n")


def test_in_a_log_there_is_one_line_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    text = drawn(monkeypatch, io.StringIO())
    assert text.startswith("save x: 100% of 2.0 MB, ")
    assert text.count("\n") == 1
    assert "\r" not in text


def test_what_a_terminal_would_act_on_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\\x1b[2J" in drawn(monkeypatch, io.StringIO(), "load \x1b[2J")


def test_a_closed_standard_error_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    stream.close()
    monkeypatch.setattr("sys.stderr", stream)
    with Reporter(True, "save x", 0, 1) as shown:
        shown.update(Progress(1, 1, 1))


def test_other_ranks_draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Reporter(True, "save x", 1, 1).active
