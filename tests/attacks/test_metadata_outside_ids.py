"""The metadata's pickle refers to objects outside of it: persistent ids and registered extensions.

The attacker hopes for a registered extension in the process that is useful for an attack. torch's
``pickle.load`` follows extension codes. Our readers must not follow references out of the pickle.
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
    """Registers an extension that the attacker can use."""
    copyreg.add_extension(os.system.__module__, "system", CODE)
    yield
    copyreg.remove_extension(os.system.__module__, "system", CODE)


def test_a_cached_extension_is_rejected(checkpoint: Checkpoint) -> None:
    # Python caches the extension and does not call find_class for it again.
    pickle.loads(b"\x80\x04\x82\x71.")
    ATTACKS["metadata: EXT1"](checkpoint)
    checkpoint.assert_stopped("metadata: EXT1 that is known", Unsafe, Corrupt)


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_attack_is_rejected(checkpoint: Checkpoint, attack: str) -> None:
    ATTACKS[attack](checkpoint)
    checkpoint.assert_stopped(attack, Unsafe, Corrupt)


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.torture
def test_the_outcome_of_stock_torch_is_recorded(checkpoint: Checkpoint, attack: str) -> None:
    ATTACKS[attack](checkpoint)
    checkpoint.record_stock(attack)
