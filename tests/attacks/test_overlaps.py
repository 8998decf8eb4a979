"""Records share bytes.

The attacker makes a small file cause a large load, or makes one tensor of two that were compared.
torch reads the checkpoint.
"""

from __future__ import annotations

import pytest

from tests.attacks.support import Attack, Checkpoint
from torch_ckpt import Corrupt


def the_same(c: Checkpoint) -> None:
    c.save_with_torch()
    weight, bias = c.location("weight"), c.location("bias")
    bias.offset, bias.length = weight.offset, weight.length
    c.publish()


def in_part(c: Checkpoint) -> None:
    c.save_with_torch()
    c.location("weight").length += 1
    c.location("bias").length += 1
    c.publish()


def by_another_spelling(c: Checkpoint) -> None:
    c.save_with_torch()
    weight, bias = c.location("weight"), c.location("bias")
    bias.offset, bias.length = weight.offset, weight.length
    bias.relative_path = f"./{weight.relative_path}"
    c.publish()


ATTACKS: dict[str, Attack] = {
    "overlap: the same record": the_same,
    "overlap: in part": in_part,
    "overlap: by another spelling of the file": by_another_spelling,
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_attack_is_rejected(checkpoint: Checkpoint, attack: str) -> None:
    ATTACKS[attack](checkpoint)
    checkpoint.assert_stopped(attack, Corrupt, message="overlaps the range of")


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.torture
def test_the_outcome_of_stock_torch_is_recorded(checkpoint: Checkpoint, attack: str) -> None:
    ATTACKS[attack](checkpoint)
    checkpoint.record_stock(attack)


def test_empty_records_may_overlap_others(checkpoint: Checkpoint) -> None:
    # Not an attack: a planner may store objects without bytes.
    checkpoint.location("step").offset = checkpoint.location("weight").offset + 1
    checkpoint.location("step").length = 0
    checkpoint.publish()
    state = {"weight": checkpoint.targets()["weight"]}
    checkpoint._our_load(state)
    assert state["weight"].sum() == 66
