"""The metadata's pickle refers to things outside of it: persistent ids and registered extensions.

The attacker hopes that somebody in the process has registered something that helps him. torch's
``pickle.load`` follows extension codes. Here nothing outside of the pickle is referred to.
"""

from __future__ import annotations

import copyreg
import os
import pickle
from collections.abc import Iterator

import pytest

from tests.attacks.support import Attack, Checkpoint
from torch_ckpt import Corrupt, Unsafe

CODE = 0x71

ATTACKS: dict[str, Attack] = {
    "metadata: PERSID": lambda c: c.publish_bytes(b"\x80\x04Psomething\n."),
    "metadata: BINPERSID": lambda c: c.publish_bytes(b"\x80\x04\x8c\x01aQ."),
    "metadata: EXT1": lambda c: c.publish_bytes(
        b"\x80\x04\x82\x71\x8c"
        + bytes([len(f"touch {c.canary}")])
        + f"touch {c.canary}".encode()
        + b"\x85R."
    ),
}


@pytest.fixture(autouse=True)
def extension() -> Iterator[None]:
    """Somebody has registered what the attacker needs."""
    copyreg.add_extension(os.system.__module__, "system", CODE)
    yield
    copyreg.remove_extension(os.system.__module__, "system", CODE)


def test_an_extension_that_is_known_already_is_refused(checkpoint: Checkpoint) -> None:
    # Python looks it up once, and asks no find_class for it again.
    pickle.loads(b"\x80\x04\x82\x71.")
    ATTACKS["metadata: EXT1"](checkpoint)
    checkpoint.assert_stopped("metadata: EXT1 that is known", Unsafe, Corrupt)


@pytest.mark.parametrize("attack", ATTACKS)
def test_it_is_refused(checkpoint: Checkpoint, attack: str) -> None:
    ATTACKS[attack](checkpoint)
    checkpoint.assert_stopped(attack, Unsafe, Corrupt)


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.torture
def test_what_stock_does(checkpoint: Checkpoint, attack: str) -> None:
    ATTACKS[attack](checkpoint)
    checkpoint.note_stock(attack)
