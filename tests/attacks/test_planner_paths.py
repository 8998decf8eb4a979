"""The metadata places a value at index 2**40 of a list.

torch's planner for loading without a state dict fills lists with None up to such an index. The
attacker wants the memory to be full of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import torch_ckpt
from tests.attacks.support import TABLE, Checkpoint, in_child
from tests.support import assert_equal, save
from torch_ckpt import Corrupt

ATTACKS: dict[str, Any] = {
    "planner path: 2**31": ("list", 2**31),
    "planner path: negative": ("list", -5),
}


# Beside paths that are none, in other types than torch writes.
DISGUISED: dict[str, Any] = {
    "list": ["list", 2**31],
    "size": torch.Size([0, 2**31]),
    "dict": {0: "list", 1: 2**31},
    "tuple": ("list", 2**31),
}


def spoil(c: Checkpoint, attack: str) -> None:
    c.of_stock()
    c.metadata.planner_data["weight"] = ATTACKS[attack]
    c.publish()


@pytest.mark.parametrize("attack", ATTACKS)
def test_it_is_refused(checkpoint: Checkpoint, attack: str) -> None:
    spoil(checkpoint, attack)
    checkpoint.assert_stopped(attack, Corrupt, says="weight: the metadata places it in a list")


@pytest.mark.parametrize("kind", DISGUISED)
def test_it_is_refused_in_other_types_too(checkpoint: Checkpoint, kind: str) -> None:
    checkpoint.of_stock()
    checkpoint.metadata.planner_data["weight"] = DISGUISED[kind]
    checkpoint.metadata.planner_data["other"] = ["no path"]
    checkpoint.publish()
    with pytest.raises(Corrupt, match="weight: the metadata places it in a list"):
        torch_ckpt.FileSystemReader(checkpoint.path).read_metadata()


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.torture
def test_what_stock_does(checkpoint: Checkpoint, attack: str) -> None:
    spoil(checkpoint, attack)

    def load() -> None:
        reader = dcp.FileSystemReader(checkpoint.path)
        planner = _EmptyStateDictLoadPlanner()
        dcp.load({}, storage_reader=reader, planner=planner, no_dist=True)

    TABLE.setdefault(attack, {})["stock"] = in_child(load)


def test_one_long_path_of_many_names_takes_the_time_of_one(checkpoint: Checkpoint) -> None:
    # A megabyte of metadata, and minutes where each name's path is looked at.
    path = (0,) * 80_000
    checkpoint.metadata.planner_data = {str(number): path for number in range(40_000)}
    checkpoint.publish()
    state = checkpoint.targets()
    torch_ckpt.load(state, checkpoint.path, no_dist=True)


def test_a_list_that_is_there_is_loaded(tmp_path: Path) -> None:
    # Not an attack.
    save({"list": [torch.ones(2), torch.ones(3)]}, tmp_path)
    state: dict[str, Any] = {}
    reader = torch_ckpt.FileSystemReader(tmp_path)
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
    assert_equal(state, {"list": [torch.ones(2), torch.ones(3)]})
