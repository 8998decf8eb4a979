"""The temporary name of the metadata can be guessed.

The attacker creates it first, as a link or as a file that stays open, to control the committed
metadata. torch's name is always ``.metadata.tmp``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_ckpt
from tests.attacks.support import TABLE, in_child

ATTACK = "temporary name: a file that is kept open"


def state() -> dict[str, torch.Tensor]:
    return {"weight": torch.ones(5)}


def open_before(directory: Path) -> int:
    """Creates the file with that name. Returns the descriptor that the attacker keeps."""
    directory.mkdir()
    return os.open(directory / ".metadata.tmp", os.O_RDWR | os.O_CREAT)


def is_committed(descriptor: int, directory: Path) -> bool:
    """Returns True if the attacker's file has become the metadata."""
    return os.path.samestat(os.fstat(descriptor), os.stat(directory / ".metadata"))


def test_the_attackers_file_does_not_become_the_metadata(tmp_path: Path) -> None:
    TABLE.setdefault(ATTACK, {})["ours"] = "not stopped"
    directory = tmp_path / "checkpoint"
    descriptor = open_before(directory)
    try:
        torch_ckpt.save(state(), directory, no_dist=True)
        assert not is_committed(descriptor, directory)
        assert os.fstat(descriptor).st_size == 0
    finally:
        os.close(descriptor)
    TABLE[ATTACK]["ours"] = "stopped: another file"


@pytest.mark.torture
def test_the_outcome_of_stock_torch_is_recorded(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    descriptor = open_before(directory)
    try:
        outcome = in_child(
            lambda: dcp.save(state(), storage_writer=dcp.FileSystemWriter(directory), no_dist=True),
            worked=lambda: is_committed(descriptor, directory),
        )
    finally:
        os.close(descriptor)
    TABLE.setdefault(ATTACK, {})["stock"] = outcome.replace("executed", "overwritten")
