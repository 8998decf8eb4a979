"""The pickle of a tensor's record calls a function.

torch reads such records by ``torch.load(weights_only=True)``. Our readers decode them by a grammar
that accepts one program, and read all others by ``torch.load(weights_only=True)``, too.
"""

from __future__ import annotations

import io

import pytest
import torch

from tests.attacks.support import Attack, Calls, Checkpoint, record_of_object, with_entry
from tests.support import record_of
from torch_ckpt import Corrupt, Unsafe


def os_system(c: Checkpoint) -> None:
    c.replace_record("weight", record_of_object(c.make_payload()))


def amid_the_tensor(c: Checkpoint) -> None:
    tensor = torch.ones(3, 4)
    state = tensor.__reduce_ex__(2)
    value = Calls(state[0], *state[1][:-1], c.make_payload())
    c.replace_record("weight", record_of_object(value))


def old_format(c: Checkpoint) -> None:
    stream = io.BytesIO()
    torch.save(c.make_payload(), stream, _use_new_zipfile_serialization=False)
    c.replace_record("weight", stream.getvalue())


def torch_script(c: Checkpoint) -> None:
    stream = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.ReLU()), stream)
    c.replace_record("weight", stream.getvalue())


def endless_program(c: Checkpoint) -> None:
    record = record_of(torch.ones(3, 4))
    c.replace_record("weight", with_entry(record, "data.pkl", b"\x80\x02" + b"(" * 10**6 + b"."))


ATTACKS: dict[str, Attack] = {
    "tensor: os.system": os_system,
    "tensor: os.system instead of the hooks": amid_the_tensor,
    "tensor: the format before zip": old_format,
    "tensor: a TorchScript program": torch_script,
    "tensor: a million marks": endless_program,
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_attack_is_rejected(checkpoint: Checkpoint, attack: str) -> None:
    ATTACKS[attack](checkpoint)
    checkpoint.assert_stopped(attack, Unsafe, Corrupt, ls=0, unchanged=False, message="weight: ")


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.torture
def test_the_outcome_of_stock_torch_is_recorded(checkpoint: Checkpoint, attack: str) -> None:
    ATTACKS[attack](checkpoint)
    checkpoint.record_stock(attack)
