"""The metadata's pickle sets the state of something that is not its own.

A pickle may set attributes of whatever it can name. Names on the list are classes, dtypes and
functions of this process: the attacker changes what they do from now on, in every later load, and
no name outside of the list is needed. torch lets it. Here it must be refused, and nothing changed.
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
    # (None, {"evil": 1}) is set by setattr, which classes take.
    def attack(c: Checkpoint) -> None:
        program = b"\x80\x04c" + module + b"\n" + name + b"\n" + member
        c.publish_bytes(program + b"N}\x8c\x04evil\x8c\x05owned\x73\x86b.")

    return attack


def changed() -> bool:
    """Whether any of what the attacks are about has the attacker's attribute."""
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
def test_it_is_refused(checkpoint: Checkpoint, attack: str) -> None:
    ATTACKS[attack](checkpoint)
    checkpoint.assert_stopped(attack, Unsafe, Corrupt)
    assert not changed()


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.torture
def test_what_stock_does(checkpoint: Checkpoint, attack: str) -> None:
    ATTACKS[attack](checkpoint)
    checkpoint.note_stock(attack, worked=changed)
