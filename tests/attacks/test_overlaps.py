"""Records share the same bytes.

The attacker makes a small file stand for a large load, or lets two tensors that somebody has
compared be one. torch reads it.
"""

from __future__ import annotations

import pytest

from tests.attacks.support import Attack, Checkpoint
from torch_ckpt import Corrupt


def the_same(c: Checkpoint) -> None:
    c.of_stock()
    weight, bias = c.place("weight"), c.place("bias")
    bias.offset, bias.length = weight.offset, weight.length
    c.publish()


def in_part(c: Checkpoint) -> None:
    c.of_stock()
    c.place("weight").length += 1
    c.place("bias").length += 1
    c.publish()


def by_another_spelling(c: Checkpoint) -> None:
    c.of_stock()
    weight, bias = c.place("weight"), c.place("bias")
    bias.offset, bias.length = weight.offset, weight.length
    bias.relative_path = f"./{weight.relative_path}"
    c.publish()


ATTACKS: dict[str, Attack] = {
    "overlap: the same record": the_same,
    "overlap: in part": in_part,
    "overlap: by another spelling of the file": by_another_spelling,
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_it_is_refused(checkpoint: Checkpoint, attack: str) -> None:
    ATTACKS[attack](checkpoint)
    checkpoint.assert_stopped(attack, Corrupt, says="overlaps them from byte")


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.torture
def test_what_stock_does(checkpoint: Checkpoint, attack: str) -> None:
    ATTACKS[attack](checkpoint)
    checkpoint.note_stock(attack)


def test_empty_records_may_lie_anywhere(checkpoint: Checkpoint) -> None:
    # Objects that a planner stored without bytes: not an attack.
    checkpoint.place("step").offset = checkpoint.place("weight").offset + 1
    checkpoint.place("step").length = 0
    checkpoint.publish()
    state = {"weight": checkpoint.targets()["weight"]}
    checkpoint._our_load(state)
    assert state["weight"].sum() == 66
