"""The metadata's pickle calls a function.

The attacker wants to run code on the loading machine. torch unpickles ``.metadata`` with
``pickle.load``, which executes the pickle. Our readers must reject every name that is not
allow-listed before anything is called, for all opcodes and in all parts of the metadata.
"""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
from typing import Any

import pytest

from tests.attacks.support import Calls, Checkpoint
from torch_ckpt import Corrupt, Unsafe


def _short(text: str) -> bytes:
    return b"\x8c" + struct.pack("<B", len(text)) + text.encode()


def instead(payload: Any, protocol: int = 4) -> Any:
    return lambda c: c.publish_bytes(pickle.dumps(payload(c), protocol))


def inside(c: Checkpoint) -> None:
    c.metadata.planner_data["weight"] = c.make_payload()
    c.publish()


def as_a_size(c: Checkpoint) -> None:
    c.metadata.state_dict_metadata["weight"].size = c.make_payload()
    c.publish()


def as_a_key(c: Checkpoint) -> None:
    c.metadata.state_dict_metadata[c.make_payload()] = 1
    c.publish()


def by_inst(c: Checkpoint) -> None:
    c.publish_bytes(b"(S'touch " + str(c.canary).encode() + b"'\nios\nsystem\n.")


def by_obj(c: Checkpoint) -> None:
    c.publish_bytes(b"(cos\nsystem\nS'touch " + str(c.canary).encode() + b"'\no.")


def by_a_dotted_name(c: Checkpoint) -> None:
    # An allowed module with a dotted name that leads out of it.
    name = _short("torch.distributed.checkpoint.metadata") + _short("os.system") + b"\x93"
    c.publish_bytes(b"\x80\x04" + name + _short(f"touch {c.canary}") + b"\x85R.")


def by_getattr(c: Checkpoint) -> None:
    c.publish_bytes(
        b"\x80\x04cbuiltins\ngetattr\n" + b"cbuiltins\n__import__\n" + _short("os") + b"\x85R"
        b"" + _short("system") + b"\x86R" + _short(f"touch {c.canary}") + b"\x85R."
    )


ATTACKS: dict[str, Any] = {
    "metadata: os.system": instead(lambda c: c.make_payload()),
    "metadata: os.system, protocol 0": instead(lambda c: c.make_payload(), 0),
    "metadata: eval": instead(lambda c: Calls(eval, f"open({str(c.canary)!r}, 'w')")),
    "metadata: open": instead(lambda c: Calls(open, str(c.canary), "w")),
    "metadata: subprocess": instead(lambda c: Calls(subprocess.run, ["touch", str(c.canary)])),
    "metadata: os.system in planner_data": inside,
    "metadata: os.system as a size": as_a_size,
    "metadata: os.system as a key": as_a_key,
    "metadata: INST": by_inst,
    "metadata: OBJ": by_obj,
    "metadata: a dotted name": by_a_dotted_name,
    "metadata: getattr and __import__": by_getattr,
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_attack_is_rejected(checkpoint: Checkpoint, attack: str) -> None:
    ATTACKS[attack](checkpoint)
    # Metadata never contains these two old opcodes.
    kinds = (Unsafe, Corrupt) if attack in ("metadata: INST", "metadata: OBJ") else (Unsafe,)
    checkpoint.assert_stopped(attack, *kinds)


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.torture
def test_the_outcome_of_stock_torch_is_recorded(checkpoint: Checkpoint, attack: str) -> None:
    ATTACKS[attack](checkpoint)
    checkpoint.record_stock(attack)


def test_the_payload_works(checkpoint: Checkpoint) -> None:
    # Otherwise the other tests would prove nothing.
    pickle.loads(pickle.dumps(checkpoint.make_payload()))
    assert os.path.exists(checkpoint.canary)
