"""Files that are written from their pieces."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.fault_hooks import failing
from torch_ckpt._base.system import memory_for_io
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.publishing import write_new_file

PIECE_BYTES = 1 << 20


def pieces(count: int) -> Iterator[memoryview]:
    for number in range(count):
        piece = memory_for_io(PIECE_BYTES)
        piece[0] = number
        yield piece
        del piece


def is_open(path: Path) -> bool:
    descriptors = Path("/proc/self/fd")
    opened = []
    for name in os.listdir(descriptors):
        try:
            opened.append(os.readlink(descriptors / name))
        except FileNotFoundError:  # the descriptor of the listing
            continue
    return str(path) in opened


@pytest.mark.parametrize("operation", ["pwrite", "fsync"])
def test_a_file_that_cannot_be_written_is_closed_while_the_error_is_handled(
    tmp_path: Path, operation: str
) -> None:
    with closing(OpenDirectory(tmp_path)) as directory, failing(operation, errno.ENOSPC):
        with pytest.raises(OSError, match="No space left") as failure:
            write_new_file(directory, "file", pieces(2), 2 * PIECE_BYTES)
        assert failure.value.filename == str(tmp_path / "file")
        assert not is_open(tmp_path / "file")
