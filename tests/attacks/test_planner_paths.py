"""The metadata places a value at index 2**40 of a list.

torch's planner for loads without a state dict fills lists with None up to such an index. The
attacker wants them to use up the memory.
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
from tests.attacks.support import TABLE, Attack, Checkpoint, in_child
from tests.metadata import read_metadata
from tests.support import assert_equal, save
from torch_ckpt import Corrupt

ATTACKS: dict[str, Any] = {
    "planner path: 2**31": ("list", 2**31),
    "planner path: negative": ("list", -5),
}


# Paths in other types than torch writes, next to an invalid path.
DISGUISED: dict[str, Any] = {
    "list": ["list", 2**31],
    "size": torch.Size([0, 2**31]),
    "dict": {0: "list", 1: 2**31},
    "tuple": ("list", 2**31),
}


def modify(c: Checkpoint, attack: str) -> None:
    c.save_with_torch()
    c.metadata.planner_data["weight"] = ATTACKS[attack]
    c.publish()


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_attack_is_rejected(checkpoint: Checkpoint, attack: str) -> None:
    modify(checkpoint, attack)
    checkpoint.assert_stopped(
        attack, Corrupt, message="weight: the path in the metadata has the list index"
    )


@pytest.mark.parametrize("kind", DISGUISED)
def test_the_attack_is_rejected_in_other_types(checkpoint: Checkpoint, kind: str) -> None:
    checkpoint.save_with_torch()
    checkpoint.metadata.planner_data["weight"] = DISGUISED[kind]
    checkpoint.metadata.planner_data["other"] = ["no path"]
    checkpoint.publish()
    with pytest.raises(Corrupt, match="weight: the path in the metadata has the list index"):
        torch_ckpt.FileSystemReader(checkpoint.path).read_metadata()


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.torture
def test_the_outcome_of_stock_torch_is_recorded(checkpoint: Checkpoint, attack: str) -> None:
    modify(checkpoint, attack)

    def load() -> None:
        reader = dcp.FileSystemReader(checkpoint.path)
        planner = _EmptyStateDictLoadPlanner()
        dcp.load({}, storage_reader=reader, planner=planner, no_dist=True)

    TABLE.setdefault(attack, {})["stock"] = in_child(load)


def many_lists(c: Checkpoint) -> None:
    # Each index is less than the number of names, but the lists together are too long.
    names = range(8000)
    c.metadata.planner_data = {str(n): (f"l{n}", len(names) - 1) for n in names}


def many_lists_in_a_list(c: Checkpoint) -> None:
    names = range(8000)
    c.metadata.planner_data = {str(n): ("list", n, len(names) - 1) for n in names}


def a_float(c: Checkpoint) -> None:
    # A float works as an index that is not the last of its path.
    c.metadata.planner_data["weight"] = ("list", 1e12, "key")


def one_long_path(c: Checkpoint) -> None:
    # A megabyte of metadata takes minutes for each name.
    path = (0,) * 80_000
    c.metadata.planner_data = {str(number): path for number in range(40_000)}


TOGETHER: dict[str, Attack] = {
    "planner path: the last index in 8,000 lists": many_lists,
    "planner path: the last index in 8,000 lists of a list": many_lists_in_a_list,
    "planner path: 1e12": a_float,
    "planner path: one long path of 40,000 names": one_long_path,
}


@pytest.mark.parametrize("attack", TOGETHER)
@pytest.mark.parametrize("allow_pickle", [False, True])
def test_paths_that_make_long_lists_are_rejected(
    checkpoint: Checkpoint, attack: str, allow_pickle: bool
) -> None:
    checkpoint.save_with_torch()
    TOGETHER[attack](checkpoint)
    checkpoint.publish()
    if not allow_pickle:
        checkpoint.assert_stopped(attack, Corrupt)
    with pytest.raises(Corrupt, match=r"has the list index|shared parts are counted"):
        read_metadata(checkpoint.path, allow_pickle=allow_pickle)


def test_a_stored_list_is_loaded(tmp_path: Path) -> None:
    # Not an attack.
    save({"list": [torch.ones(2), torch.ones(3)]}, tmp_path)
    state: dict[str, Any] = {}
    reader = torch_ckpt.FileSystemReader(tmp_path)
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
    assert_equal(state, {"list": [torch.ones(2), torch.ones(3)]})
