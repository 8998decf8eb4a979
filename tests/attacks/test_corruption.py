"""Bytes of a checkpoint were changed after the save.

This is damage, or an attack without knowledge of the checksums. torch checks none, and loads the
checkpoint. Our readers must detect the damage and name its location.
"""

from __future__ import annotations

import pytest
import torch

from tests.attacks.support import Attack, Checkpoint
from tests.support import flip_bit, save
from torch_ckpt import Corrupt


def bit_flip(c: Checkpoint) -> None:
    payload = torch.arange(12.0).numpy().tobytes()
    flip_bit(c.data, c.data.read_bytes().index(payload) + 7, 6)


def truncated(c: Checkpoint) -> None:
    content = c.data.read_bytes()
    c.data.write_bytes(content[: len(content) // 2])


def swapped_files(c: Checkpoint) -> None:
    # The layout is the same; only the values differ.
    other = {name: value + 1 for name, value in c.state.items()}
    save(other, c.folder / "other", thread_count=1)
    c.data.write_bytes((c.folder / "other" / "__0_0.distcp").read_bytes())


def swapped_shards(c: Checkpoint) -> None:
    for file in c.path.iterdir():
        file.unlink()
    state = {"weight": torch.ones(3, 4), "bias": torch.full((3, 4), 2.0)}
    save(state, c.path, thread_count=2)
    first, second = sorted(c.path.glob("*.distcp"))
    first.rename(c.path / "aside")
    second.rename(first)
    (c.path / "aside").rename(second)


def replaced_table(c: Checkpoint) -> None:
    tables = vars(c.metadata)["torch_ckpt"]["checksums"]
    (name,) = tables
    table = bytearray(tables[name])
    table[-1] ^= 1
    tables[name] = bytes(table)
    c.publish()


def table_of_another_type(c: Checkpoint) -> None:
    vars(c.metadata)["torch_ckpt"]["checksums"] = {"__0_0.distcp": "none"}
    c.publish()


ATTACKS: dict[str, Attack] = {
    "damage: a flipped bit": bit_flip,
    "damage: half of a file": truncated,
    "damage: a file of another save": swapped_files,
    "damage: two files swapped": swapped_shards,
    "damage: a checksum table": replaced_table,
}


def targets(attack: str) -> dict[str, torch.Tensor]:
    size = (3, 4) if attack == "damage: two files swapped" else (4,)
    return {"weight": torch.zeros(3, 4), "bias": torch.zeros(size)}


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_damage_is_detected(checkpoint: Checkpoint, attack: str) -> None:
    ATTACKS[attack](checkpoint)
    code = 1 if attack == "damage: half of a file" else 0
    checkpoint.assert_stopped(
        attack, Corrupt, ls=code, unchanged=False, targets=lambda: targets(attack)
    )


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.torture
def test_the_outcome_of_stock_torch_is_recorded(checkpoint: Checkpoint, attack: str) -> None:
    ATTACKS[attack](checkpoint)
    checkpoint.record_stock(attack, targets=lambda: targets(attack))


@pytest.mark.parametrize("ours", [3, {}, {"version": "1"}, {"version": 1}, {"version": True}])
def test_checksums_of_another_form_are_rejected(checkpoint: Checkpoint, ours: object) -> None:
    # If wrong checksums were ignored, an attacker could switch them off.
    vars(checkpoint.metadata)["torch_ckpt"] = ours
    checkpoint.publish()
    checkpoint.assert_stopped("damage: the checksums' form", Corrupt)


def test_tables_of_another_type_are_rejected(checkpoint: Checkpoint) -> None:
    table_of_another_type(checkpoint)
    checkpoint.assert_stopped("damage: a table that is a str", Corrupt)
