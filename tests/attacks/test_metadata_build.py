"""The metadata's pickle sets the state of an object that it did not create.

A pickle can set attributes of any object that it can name. The allow-listed names are classes,
dtypes and functions of this process. The attacker changes their behavior in all later loads,
without a name outside of the list. torch allows this. Our readers must reject the pickle and leave
all objects unchanged.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp_metadata

from tests.attacks.support import Checkpoint
from torch_ckpt import Corrupt, Unsafe

MODULE = b"torch.distributed.checkpoint.metadata"


def building(name: bytes, module: bytes = MODULE, member: bytes = b"") -> Any:
    # BUILD sets (None, {"evil": 1}) by setattr, which works for classes.
    def attack(c: Checkpoint) -> None:
        program = b"\x80\x04c" + module + b"\n" + name + b"\n" + member
        c.publish_bytes(program + b"N}\x8c\x04evil\x8c\x05owned\x73\x86b.")

    return attack


def changed() -> bool:
    """Returns True if one of the attacked objects has the attacker's attribute."""
    things = (
        dcp_metadata.ChunkStorageMetadata,
        dcp_metadata._MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT,
        torch.serialization._get_layout,
        torch.Size,
    )
    return any(hasattr(thing, "evil") for thing in things)


ATTACKS: dict[str, Any] = {
    "metadata: BUILD on a class": building(b"ChunkStorageMetadata"),
    "metadata: BUILD on an enum member": building(b"_MEM_FORMAT_ENCODING", member=b"K\x00\x85R"),
    "metadata: BUILD on a function": building(b"_get_layout", b"torch.serialization"),
    "metadata: BUILD on torch.Size": building(b"Size", b"torch"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_attack_is_rejected(checkpoint: Checkpoint, attack: str) -> None:
    ATTACKS[attack](checkpoint)
    checkpoint.assert_stopped(attack, Unsafe, Corrupt)
    assert not changed()


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.torture
def test_the_outcome_of_stock_torch_is_recorded(checkpoint: Checkpoint, attack: str) -> None:
    ATTACKS[attack](checkpoint)
    checkpoint.record_stock(attack, worked=changed)
