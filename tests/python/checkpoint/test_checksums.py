"""CRC-32 of zip records, as the engine computes it."""

from __future__ import annotations

import random
import zlib

import pytest

from torch_ckpt import _core


@pytest.mark.parametrize("size", [0, 1, 15, 4096, 1_000_003])
def test_a_checksum_equals_that_of_zlib(size: int) -> None:
    data = random.Random(size).randbytes(size)
    assert _core.crc32(data) == zlib.crc32(data)


def test_a_checksum_can_continue_an_earlier_one() -> None:
    data = random.Random(1).randbytes(100_000)
    assert _core.crc32(data[777:], _core.crc32(memoryview(data)[:777])) == zlib.crc32(data)


def test_memory_with_gaps_is_refused() -> None:
    with pytest.raises(BufferError):
        _core.crc32(memoryview(bytes(8))[::2])
