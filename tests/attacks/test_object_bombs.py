"""A little object asks for much memory, or for memory that is not its own.

The attacker wants the machine that loads to die, or to hand out what lies in its memory. What an
object may be made of must not be larger than what is stored of it.
"""

from __future__ import annotations

import io
import zipfile
from collections import Counter, deque
from typing import Any

import numpy
import pytest
import torch

import torch_ckpt
from tests.attacks.support import Attack, Calls, Checkpoint, record_of_object, with_entry
from torch_ckpt import Corrupt, Unsafe

MUCH = 2**40


def storing(value: Any) -> Attack:
    return lambda c: c.replace_record("step", record_of_object(value))


def program(content: bytes) -> Attack:
    record = record_of_object(7)
    return lambda c: c.replace_record("step", with_entry(record, "data.pkl", content))


def tensor_past_its_storage(c: Checkpoint) -> None:
    value = Calls(
        torch._utils._rebuild_tensor_v2,
        torch.ones(4).storage(),
        0,
        (2**20, 2**10),
        (2**10, 1),
        False,
        None,
    )
    c.replace_record("step", record_of_object((value,)))


def storage_past_its_entry(c: Checkpoint) -> None:
    record = record_of_object((torch.ones(4, dtype=torch.uint8),))
    with zipfile.ZipFile(io.BytesIO(record)) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("data.pkl")]
        old = archive.read(name)
    # K\x04: four elements, in the storage's id as in the tensor's size.
    c.replace_record("step", with_entry(record, "data.pkl", old.replace(b"K\x04", b"K\xff")))


def structured_with_objects(c: Checkpoint) -> None:
    # Bytes that become pointers.
    array = numpy.zeros(2, dtype=[("a", "O")])
    c.replace_record("step", record_of_object(array))


def object_scalar(c: Checkpoint) -> None:
    make = numpy._core.multiarray.scalar
    c.replace_record("step", record_of_object(Calls(make, numpy.dtype("O"), b"\x01" * 8)))


def sparse_out_of_bounds(c: Checkpoint) -> None:
    indices = torch.tensor([[10**9]])
    value = torch.sparse_coo_tensor(indices, torch.ones(1), (4,), check_invariants=False)
    c.replace_record("step", record_of_object((value,)))


def numpys_own_dtype(c: Checkpoint) -> None:
    # np.dtype("f8") without a copy is the one that all arrays share.
    c.replace_record("step", record_of_object(_Swapped()))


class _Swapped:
    def __reduce__(self) -> Any:
        state = (3, ">", None, None, None, -1, -1, 0)
        return numpy.dtype, ("f8", False, False), state


ATTACKS: dict[str, Attack] = {
    "object: bytes(2**40)": storing(Calls(bytes, MUCH)),
    "object: bytearray(2**40)": storing(Calls(bytearray, MUCH)),
    "object: list(range(2**40))": storing(Calls(list, range(MUCH))),
    "object: set(range(2**40))": storing(Calls(set, range(MUCH))),
    "object: deque(range(2**40))": storing(Calls(deque, range(MUCH))),
    "object: Counter(range(2**40))": storing(Calls(Counter, range(MUCH))),
    "object: torch.empty(2**40)": storing(Calls(torch.FloatTensor, MUCH)),
    "object: a tensor past its storage": tensor_past_its_storage,
    "object: a storage past its entry": storage_past_its_entry,
    "object: an array of pointers": structured_with_objects,
    "object: a scalar that is a pointer": object_scalar,
    "object: sparse indices out of bounds": sparse_out_of_bounds,
    "object: BINUNICODE of 4 GiB": program(b"\x80\x02X\xff\xff\xff\xff."),
    "object: BINBYTES8 of 1 TiB": program(b"\x80\x02\x8e" + MUCH.to_bytes(8, "little") + b"."),
    "object: doubling tuples as a key": program(
        b"\x80\x02}K\x01" + b"q\x00h\x00\x86" * 60 + b"K\x01s."
    ),
    "object: deep tuples as a key": program(b"\x80\x02})" + b"\x85" * 10**6 + b"K\x01s."),
    "object: deep slices": program(
        b"\x80\x02N" + b"q\x00cbuiltins\nslice\nh\x00NN\x87R" * 10**5 + b"."
    ),
    "object: BUILD on a class": program(
        b"\x80\x02cargparse\nNamespace\nN}X\x04\x00\x00\x00evilK\x01s\x86b."
    ),
    "object: BUILD on a function": program(
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nN}X\x04\x00\x00\x00evilK\x01s\x86b."
    ),
    "object: a persistent id that is no storage": program(b"\x80\x02X\x01\x00\x00\x00aQ."),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_it_is_refused(checkpoint: Checkpoint, attack: str) -> None:
    ATTACKS[attack](checkpoint)
    checkpoint.assert_stopped(attack, Unsafe, Corrupt, ls=0, says="step: the object in")


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_stock_does(checkpoint: Checkpoint, attack: str) -> None:
    ATTACKS[attack](checkpoint)
    checkpoint.note_stock(attack)


def test_numpys_own_dtype_stays_what_it_was(checkpoint: Checkpoint) -> None:
    # What it makes is harmless, so that there is nothing to refuse.
    numpys_own_dtype(checkpoint)
    state = checkpoint.targets()
    torch_ckpt.load(state, checkpoint.path, no_dist=True)
    assert state["step"] == numpy.dtype(">f8")
    assert numpy.dtype("f8").isnative


def test_a_pickle_that_doubles_is_no_larger_than_what_it_shares(checkpoint: Checkpoint) -> None:
    # Nobody hashes or copies it: it is a list of 60 pairs in memory, too.
    content = b"\x80\x02]" + b"q\x00h\x00\x86" * 60 + b"."
    program(content)(checkpoint)
    state = checkpoint.targets()
    torch_ckpt.load(state, checkpoint.path, no_dist=True)
    value = state["step"]
    for _ in range(60):
        assert value[0] is value[1]
        value = value[0]
    assert value == []
