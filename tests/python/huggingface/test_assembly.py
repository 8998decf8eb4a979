"""The windows of a file that a rank assembles."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from torch_ckpt.huggingface.assembly import Assembly, _Windows

WINDOW_BYTES = 16 << 20


class File:
    """A file of two windows from one rank."""

    name = "model.safetensors"
    bytes = 2 * WINDOW_BYTES
    ranks = (1,)

    def copy_head(self, _begin: int, _out: bytearray) -> None: ...

    def ranges(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        return [(0, begin, end - begin)]

    def copy(self, *_arguments: Any) -> None: ...


class Sender:
    """A connection that is lost after the first window."""

    def __init__(self) -> None:
        self.left = WINDOW_BYTES
        self.may_be_lost = threading.Event()
        self.is_lost = threading.Event()

    def receive(self, count: int, buffer: memoryview) -> Iterator[memoryview]:
        while count > 0:
            if self.left == 0:
                self.may_be_lost.wait()
                self.is_lost.set()
                raise ConnectionError("lost")
            part = buffer[:count]
            yield part
            count -= len(part)
            self.left -= len(part)


def test_a_window_that_is_lost_while_another_is_written_is_not_written() -> None:
    sender: Any = Sender()
    file: Any = File()
    windows = _Windows(file, [sender], None, lambda _bytes: None)
    first = next(windows)
    sender.may_be_lost.set()
    sender.is_lost.wait()
    with pytest.raises(ConnectionError, match="lost"):
        next(windows)
    assert len(first) == WINDOW_BYTES
    windows.stop()


@pytest.mark.parametrize(("window_waits", "is_alive"), [(None, True), (True, True), (False, False)])
def test_a_rank_is_alive_while_a_receiver_keeps_it_waiting_and_its_own_files_wait_too(
    window_waits: bool | None, is_alive: bool
) -> None:
    progress: list[int] = []
    assembly = Assembly.__new__(Assembly)
    assembly._on_bytes = progress.append
    assembly._senders = {}
    assembly._receivers = {1: mock.Mock(is_waiting=True)}
    assembly._windows = None if window_waits is None else mock.Mock(is_waiting=window_waits)
    assembly._beat()
    assert bool(progress) == is_alive
