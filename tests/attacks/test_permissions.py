"""Files of a checkpoint have wider permissions than their owner allows.

Another user of the machine wants to read or to replace the weights. New files must never have more
permissions than the umask allows.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_ckpt
from tests.attacks.support import TABLE, umask


def modes(directory: Path) -> dict[str, int]:
    files = [directory, *directory.rglob("*")]
    return {file.name: stat.S_IMODE(file.stat().st_mode) for file in files}


def by_dcp(directory: Path) -> None:
    writer = torch_ckpt.FileSystemWriter(directory)
    dcp.save({"weight": torch.ones(5), "step": 1}, storage_writer=writer, no_dist=True)


def by_us(directory: Path) -> None:
    torch_ckpt.save({"weight": torch.ones(5), "step": 1}, directory, no_dist=True)


def by_stock(directory: Path) -> None:
    writer = dcp.FileSystemWriter(directory)
    dcp.save({"weight": torch.ones(5), "step": 1}, storage_writer=writer, no_dist=True)


@pytest.mark.parametrize("save", [by_dcp, by_us])
@pytest.mark.parametrize("mask", [0o077, 0o027, 0o022])
def test_no_file_has_more_permissions_than_the_umask_allows(
    tmp_path: Path, save: Any, mask: int
) -> None:
    attack = f"permissions: umask {mask:03o}"
    TABLE.setdefault(attack, {})["ours"] = "not stopped"
    directory = tmp_path / "new" / "checkpoint"
    with umask(mask):
        save(directory)
        save(directory)  # overwrites the checkpoint
    found = modes(directory)
    assert found.pop("checkpoint") == 0o777 & ~mask
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o777 & ~mask
    assert set(found.values()) == {0o666 & ~mask}
    TABLE[attack]["ours"] = "stopped: honours it"


@pytest.mark.parametrize("mask", [0o077, 0o027, 0o022])
@pytest.mark.torture
def test_the_outcome_of_stock_torch_is_recorded(tmp_path: Path, mask: int) -> None:
    with umask(mask):
        by_stock(tmp_path / "checkpoint")
    wider = any(mode & mask for mode in modes(tmp_path / "checkpoint").values())
    outcome = "wider" if wider else "safe"
    TABLE.setdefault(f"permissions: umask {mask:03o}", {})["stock"] = outcome
