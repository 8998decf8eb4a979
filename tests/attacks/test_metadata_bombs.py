"""A little metadata asks for much memory or much time.

The attacker wants the machine that loads to hang or to die. The metadata must be refused at a cost
that its size bounds.
"""

from __future__ import annotations

import struct

import pytest

from tests.attacks.support import Attack, Checkpoint
from torch_ckpt import CheckpointError, Corrupt, Unsafe

DOUBLINGS = 60
DEPTH = 1_000_000


def doubling_key(c: Checkpoint) -> None:
    # ((..., ...), (..., ...)) by reference, as the key of a dict: hashing it takes 2**60 steps.
    c.publish_bytes(b"\x80\x04}K\x01" + b"q\x00h\x00\x86" * DOUBLINGS + b"K\x01s.")


def deep_key(c: Checkpoint) -> None:
    # Hashing it recurses a million times.
    c.publish_bytes(b"\x80\x04})" + b"\x85" * DEPTH + b"K\x01s.")


ATTACKS: dict[str, Attack] = {
    "metadata: BINBYTES8 of 1 TiB": lambda c: c.publish_bytes(
        b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"."
    ),
    "metadata: BINUNICODE8 of 2**63": lambda c: c.publish_bytes(
        b"\x80\x04\x8d" + struct.pack("<Q", 2**63) + b"."
    ),
    "metadata: a frame of 1 TiB": lambda c: c.publish_bytes(
        b"\x80\x04\x95" + struct.pack("<Q", 2**40) + b"N."
    ),
    "metadata: deep nesting": lambda c: c.publish_bytes(
        b"\x80\x04" + b")" + b"\x85" * DEPTH + b"."
    ),
    "metadata: open marks": lambda c: c.publish_bytes(b"\x80\x04" + b"(" * DEPTH + b"."),
}

# What only the verifier stops; without it these would take this process's memory or its stack.
VERIFIED: dict[str, Attack] = {
    "metadata: memo index 2**31": lambda c: c.publish_bytes(b"\x80\x04Nr\x00\x00\x00\x80."),
    "metadata: doubling tuples as a key": doubling_key,
    "metadata: deep tuples as a key": deep_key,
}

ALL = ATTACKS | VERIFIED


@pytest.mark.parametrize("attack", ALL)
def test_it_is_refused(checkpoint: Checkpoint, attack: str) -> None:
    ALL[attack](checkpoint)
    checkpoint.assert_stopped(attack, Corrupt, Unsafe, CheckpointError)


@pytest.mark.parametrize("attack", ALL)
@pytest.mark.torture
def test_what_stock_does(checkpoint: Checkpoint, attack: str) -> None:
    ALL[attack](checkpoint)
    checkpoint.note_stock(attack)
