"""_C.Save.unfinished: the phase and progress of each unfinished file of a save."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forked import answer_of
from tests.support import random_tensor
from torch_ckpt import _C, Background, CheckpointError, _core
from torch_ckpt.options import CHUNK_BYTES

#: Limit of waits that should not block, in seconds.
LIMIT = 60.0


def start(path: Path, values: list[Any], background: Background) -> _C.Save:
    sources = _C.SaveSources()
    for number, value in enumerate(values):
        sources.add(f"value {number}", value)
    save = _C.Save()
    save.start(
        _core.Directory(path),
        "__0_",
        sources,
        buckets=1,
        chunk_bytes=CHUNK_BYTES,
        max_host_bytes=0,
        direct_io="auto",
        sync=True,
        snapshot=True,
        background=background,
    )
    return save


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[_C.Save]:
    """Makes a save whose second chunk is scheduled in some weeks. A thread runs the save."""
    state = random_tensor((3, CHUNK_BYTES), torch.uint8, 1)
    save = start(tmp_path, [state], Background(max_bytes_per_second=1))
    staged = threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            save.run(staged.set)
        except CheckpointError as error:
            save.cancel_and_wait()
            errors.append(error)

    running = threading.Thread(target=run)
    running.start()
    assert staged.wait(LIMIT)
    yield save
    save.cancel()
    running.join(LIMIT)
    assert len(errors) == 1
    assert save.unfinished() == [], "a failed save has no files under way"


def test_a_forked_child_has_no_unfinished_files(stuck: _C.Save) -> None:
    assert stuck.unfinished() != []
    assert answer_of(stuck.unfinished) == []


def test_bytes_that_are_not_consecutive_are_refused(tmp_path: Path) -> None:
    every_second = memoryview(b"0123456789")[::2]
    with pytest.raises(ValueError, match="value 0: the buffer must be contiguous in memory"):
        start(tmp_path, [every_second], Background())
