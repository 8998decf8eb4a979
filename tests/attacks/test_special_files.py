"""A data file or the metadata is a FIFO or a device.

The attacker wants the load to wait forever or to read without end, or wants the side effect of
opening a device. torch waits.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.support import Checkpoint
from torch_ckpt import CheckpointError


def make_fifo(file: Path) -> None:
    os.mkfifo(file)


def make_zero(file: Path) -> None:
    try:
        os.mknod(file, stat.S_IFCHR | 0o600, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("making a device takes root")


def make_directory(file: Path) -> None:
    file.mkdir()


def data_is(make: Any) -> Any:
    def attack(c: Checkpoint) -> None:
        c.save_with_torch()
        file = c.data
        file.unlink()
        make(file)

    return attack


def metadata_is(make: Any) -> Any:
    def attack(c: Checkpoint) -> None:
        (c.path / ".metadata").unlink()
        make(c.path / ".metadata")

    return attack


DATA = {
    "special file: a FIFO for data": data_is(make_fifo),
    "special file: /dev/zero for data": data_is(make_zero),
    "special file: a directory for data": data_is(make_directory),
}
METADATA = {
    "special file: a FIFO for the metadata": metadata_is(make_fifo),
    "special file: /dev/zero for the metadata": metadata_is(make_zero),
    "special file: a directory for the metadata": metadata_is(make_directory),
}


@pytest.mark.parametrize("attack", DATA)
def test_a_special_file_for_data_is_rejected(checkpoint: Checkpoint, attack: str) -> None:
    DATA[attack](checkpoint)
    checkpoint.assert_stopped(
        attack, CheckpointError, OSError, ValueError, ls=1, message="__0_0.distcp"
    )


@pytest.mark.parametrize("attack", METADATA)
def test_a_special_file_for_the_metadata_is_rejected(checkpoint: Checkpoint, attack: str) -> None:
    METADATA[attack](checkpoint)
    checkpoint.assert_stopped(attack, CheckpointError, OSError)


@pytest.mark.parametrize("attack", DATA | METADATA)
@pytest.mark.torture
def test_the_outcome_of_stock_torch_is_recorded(checkpoint: Checkpoint, attack: str) -> None:
    (DATA | METADATA)[attack](checkpoint)
    checkpoint.record_stock(attack)
