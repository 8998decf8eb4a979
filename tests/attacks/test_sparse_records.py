"""A record is a sparse file: a few bytes on disk, but as long as the attacker likes.

The attacker wants a reader to allocate memory for the hole.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.checkpoint.filesystem import _StorageInfo

import torch_ckpt
from tests.attacks.support import PATIENCE_SECONDS, Checkpoint
from tests.forked import Answering
from tests.support import process_memory, reset_peak_memory
from torch_ckpt.inspection.diff import diff
from torch_ckpt.inspection.show import show

SIZE = 64 << 30
MOST_BYTES = 64 << 20


def forged_end(directory: int, entries: int) -> bytes:
    """Returns the end of an archive with a central directory of ``directory`` bytes before it."""
    at = SIZE - 98
    end64 = struct.pack(
        "<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, entries, entries, directory, at - directory
    )
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, at, 1)
    end = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 65535, 65535, 2**32 - 1, 2**32 - 1, 0)
    return end64 + locator + end


ENDS = {
    "no archive": b"",
    "one entry": forged_end(SIZE - 98, 1),
    "as many entries as fit": forged_end(SIZE - 98, SIZE // 46),
    "2**63 entries": forged_end(SIZE - 98, 2**63),
}


@pytest.fixture(params=ENDS)
def sparse(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint of torch in which the object and a tensor are 64 GiB each."""
    checkpoint.save_with_torch()
    for name in ("step", "weight"):
        with (checkpoint.path / f"{name}.distcp").open("wb") as file:
            file.write(b"PK\x03\x04")
            file.seek(SIZE - len(ENDS[request.param]))
            file.write(ENDS[request.param])
            file.truncate(SIZE)
        checkpoint.set_location(_StorageInfo(f"{name}.distcp", 0, SIZE), name)
    checkpoint.publish()
    return checkpoint


def in_bounded_memory(work: Callable[[], Any]) -> Any:
    """Runs ``work`` in a child and returns its result. Fails if the child used much memory."""

    def measured(_send: object) -> Any:
        reset_peak_memory()
        before = process_memory("VmHWM")
        result = work()
        return result, process_memory("VmHWM") - before

    child = Answering(measured)
    try:
        answer = child.answer(4 * PATIENCE_SECONDS)
        assert answer is not None, "the child died"
        result, used = answer
        assert used <= MOST_BYTES, f"{used} bytes of memory"
        return result
    finally:
        child.kill()


def test_verify_names_the_records(sparse: Checkpoint) -> None:
    report = in_bounded_memory(lambda: torch_ckpt.verify(sparse.path))
    assert not report.ok
    assert {damage.name for damage in report.damaged} == {"step", "weight"}
    for damage in report.damaged:
        assert damage.file == f"{damage.name}.distcp"
        assert len(damage.what) < 200, "one sentence"


def test_show_reads_no_object_that_is_too_large_to_show(sparse: Checkpoint) -> None:
    report = in_bounded_memory(lambda: show(sparse.path, ["step"]))
    (item,) = report.items
    assert item.value is None
    assert item.refused == "not read: the object has 68.7 GB, and show reads at most 67.1 MB"


def test_diff_names_the_tensor(sparse: Checkpoint) -> None:
    def work() -> str:
        with pytest.raises(torch_ckpt.CheckpointError) as error:
            diff(sparse.path, sparse.path, names=["weight"])
        return str(error.value)

    assert "weight: " in in_bounded_memory(work)
