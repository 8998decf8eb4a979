"""A link exists at a path to which a save writes.

The attacker can write to the directory, or guesses its name, and wants to overwrite a file of the
victim with the victim's permissions. torch follows links at the names of its data files and at
``.metadata.tmp``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_ckpt
from tests.attacks.support import TABLE, in_child

NAMES = ["__0_0.distcp", "__0_1.distcp", ".metadata", ".metadata.tmp"]
PRECIOUS = b"precious" * 1000


def trap(tmp_path: Path, name: str) -> tuple[Path, Path]:
    """Creates a directory with a link to a file of the victim."""
    victim = tmp_path / "victim"
    victim.write_bytes(PRECIOUS)
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    (directory / name).symlink_to(victim)
    return directory, victim


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ours", ["dcp.save", "torch_ckpt.save"])
def test_the_other_file_does_not_change(tmp_path: Path, name: str, ours: str) -> None:
    directory, victim = trap(tmp_path, name)
    state = {"weight": torch.arange(12.0), "step": 1}
    TABLE.setdefault(f"symlink: written at {name}", {})["ours"] = "not stopped"
    if ours == "dcp.save":
        writer = torch_ckpt.FileSystemWriter(directory)
        dcp.save(state, storage_writer=writer, no_dist=True)
    else:
        torch_ckpt.save(state, directory, no_dist=True)
    assert victim.read_bytes() == PRECIOUS
    loaded = {"weight": torch.zeros(12), "step": 0}
    torch_ckpt.load(loaded, directory, no_dist=True)
    assert torch.equal(loaded["weight"], state["weight"])
    TABLE[f"symlink: written at {name}"]["ours"] = "stopped: written beside it"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.torture
def test_the_outcome_of_stock_torch_is_recorded(tmp_path: Path, name: str) -> None:
    directory, victim = trap(tmp_path, name)

    def save() -> None:
        writer = dcp.FileSystemWriter(directory)
        dcp.save({"weight": torch.arange(12.0)}, storage_writer=writer, no_dist=True)

    outcome = in_child(save, worked=lambda: not os.path.exists(victim))
    if victim.read_bytes() != PRECIOUS:
        outcome = "overwritten"
    elif outcome == "read":
        outcome = "written"
    TABLE.setdefault(f"symlink: written at {name}", {})["stock"] = outcome
