"""A data file is a link to another file.

The attacker has provided an archive that unpacks to a link, and wants another file of the machine
to be read. torch follows the link.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.attacks.support import Checkpoint
from torch_ckpt import Unsafe


def link_to_outside(c: Checkpoint) -> None:
    c.save_with_torch()
    outside = c.folder / "outside.distcp"
    c.data.rename(outside)
    (c.path / "__0_0.distcp").symlink_to(outside)


def linked_folder(c: Checkpoint) -> None:
    c.save_with_torch()
    outside = c.folder / "outside"
    outside.mkdir()
    c.data.rename(outside / "data.distcp")
    (c.path / "inside").symlink_to(outside)
    for index in c.metadata.storage_data:
        c.metadata.storage_data[index].relative_path = "inside/data.distcp"
    c.publish()


ATTACKS: dict[str, Callable[[Checkpoint], None]] = {
    "symlink: a data file": link_to_outside,
    "symlink: a folder of data files": linked_folder,
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_attack_is_rejected(checkpoint: Checkpoint, attack: str) -> None:
    ATTACKS[attack](checkpoint)
    checkpoint.assert_stopped(attack, Unsafe, ls=1)


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.torture
def test_the_outcome_of_stock_torch_is_recorded(checkpoint: Checkpoint, attack: str) -> None:
    ATTACKS[attack](checkpoint)
    checkpoint.record_stock(attack)
