"""A small object uses much memory, or memory outside of its storage.

The attacker wants the loading machine to die, or to disclose its memory. An object must not be
larger than its stored bytes.
"""

from __future__ import annotations

import io
import zipfile
from collections import Counter, OrderedDict, deque
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
    # K\x04: four elements, in the storage's id and in the tensor's size.
    c.replace_record("step", with_entry(record, "data.pkl", old.replace(b"K\x04", b"K\xff")))


def location_that_doubles(c: Checkpoint) -> None:
    # str() of the location has 2**60 characters.
    record = record_of_object((torch.ones(4),))
    with zipfile.ZipFile(io.BytesIO(record)) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("data.pkl")]
        old = archive.read(name)
    text = b"X\x03\x00\x00\x00cpu"
    assert text in old
    c.replace_record("step", with_entry(record, "data.pkl", old.replace(text, DOUBLING)))


def hooks_that_are_no_dict(c: Checkpoint) -> None:
    # The C code of backward would treat the hooks as a dict.
    storage = torch.ones(4).storage()
    make = Calls(torch._utils._rebuild_tensor_v2, storage, 0, (4,), (1,), True, 5)
    c.replace_record("step", record_of_object((make,)))


def hooks_that_backward_would_call(c: Checkpoint) -> None:
    storage = torch.ones(4).storage()
    hooks = OrderedDict([(0, 5)])
    make = Calls(torch._utils._rebuild_tensor_v2, storage, 0, (4,), (1,), True, hooks)
    c.replace_record("step", record_of_object((make,)))


def quantized_and_expanded(c: Checkpoint) -> None:
    storage = torch.quantize_per_tensor(torch.ones(1), 1.0, 0, torch.qint8).storage()
    quantizer = torch.per_tensor_affine, 1.0, 0
    size, stride = (2**31, 2**31), (0, 0)
    hooks: OrderedDict[int, int] = OrderedDict()
    make = Calls(torch._utils._rebuild_qtensor, storage, 0, size, stride, quantizer, False, hooks)
    c.replace_record("step", record_of_object((make,)))


def structured_with_objects(c: Checkpoint) -> None:
    # The stored bytes would be used as pointers.
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
    # np.dtype("f8") without a copy is the object that all arrays share.
    c.replace_record("step", record_of_object(_Swapped()))


def over_and_over(function: bytes, argument: bytes) -> bytes:
    """Returns a program that calls a function 100,000 times with the same arguments."""
    call = b"h\x00h\x01R"
    return b"\x80\x02](" + function + b"q\x00" + argument + b"q\x01" + call * 10**5 + b"e."


def text(content: bytes) -> bytes:
    return b"X" + len(content).to_bytes(4, "little") + content


DOUBLING = b")" + b"q\x00h\x00\x86" * 60

LONG_TEXT = text(b"a" * 2**20)


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
    "object: wide tuples as a key": program(
        b"\x80\x02}" + b"(" * 8 + b"N" + (b"q\x00" + b"h\x00" * 99 + b"t") * 8 + b"K\x01s."
    ),
    # Their destructors recurse in C.
    "object: deep deques": program(
        b"\x80\x02]ccollections\ndeque\nq\x00]" + b"h\x00]" * 10**5 + b"\x85Ra" * (10**5 + 1) + b"."
    ),
    "object: deep defaultdicts": program(
        b"\x80\x02ccollections\ndefaultdict\nq\x00)R" + b"Nh\x00)R" * 10**5 + b"s" * 10**5 + b"."
    ),
    # Built from the outermost to the innermost; each contains the next one before it is filled.
    "object: deep deques, filled within each other": program(
        b"\x80\x02(ccollections\ndeque\nq\x00)R" + b"h\x00)Rq\x01ah\x01" * 10**5 + b"t."
    ),
    "object: one text as bytes, over and over": program(
        over_and_over(b"c_codecs\nencode\n", LONG_TEXT + b"X\x06\x00\x00\x00latin1\x86")
    ),
    "object: one text as a bytearray, over and over": program(
        over_and_over(b"cbuiltins\nbytearray\n", LONG_TEXT + b"X\x06\x00\x00\x00latin1\x86")
    ),
    "object: one list as a deque, over and over": program(
        over_and_over(b"ccollections\ndeque\n", b"](" + b"N" * 10**5 + b"e\x85")
    ),
    "object: one path, over and over": program(
        over_and_over(b"cpathlib\nPosixPath\n", text(b"a/" * 10**5) + b"\x85")
    ),
    "object: a tensor whose location doubles": location_that_doubles,
    "object: a tensor whose hooks are no dict": hooks_that_are_no_dict,
    "object: a tensor with hooks": hooks_that_backward_would_call,
    "object: a quantized tensor that is expanded": quantized_and_expanded,
    "object: BUILD on a class": program(
        b"\x80\x02cargparse\nNamespace\nN}X\x04\x00\x00\x00evilK\x01s\x86b."
    ),
    "object: BUILD on a function": program(
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nN}X\x04\x00\x00\x00evilK\x01s\x86b."
    ),
    "object: a persistent id that is no storage": program(b"\x80\x02X\x01\x00\x00\x00aQ."),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_attack_is_rejected(checkpoint: Checkpoint, attack: str) -> None:
    ATTACKS[attack](checkpoint)
    checkpoint.assert_stopped(attack, Unsafe, Corrupt, ls=0, message="step: the object in")


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.torture
def test_the_outcome_of_stock_torch_is_recorded(checkpoint: Checkpoint, attack: str) -> None:
    ATTACKS[attack](checkpoint)
    checkpoint.record_stock(attack)


def test_the_shared_dtype_of_numpy_is_not_changed(checkpoint: Checkpoint) -> None:
    # The object itself is safe, so the load succeeds.
    numpys_own_dtype(checkpoint)
    state = checkpoint.targets()
    torch_ckpt.load(state, checkpoint.path, no_dist=True)
    assert state["step"] == numpy.dtype(">f8")
    assert numpy.dtype("f8").isnative


def test_an_object_with_shared_parts_loads_without_copies(checkpoint: Checkpoint) -> None:
    # The object is neither hashed nor copied, so it is a list of 60 pairs in memory, too.
    content = b"\x80\x02]" + b"q\x00h\x00\x86" * 60 + b"."
    program(content)(checkpoint)
    state = checkpoint.targets()
    torch_ckpt.load(state, checkpoint.path, no_dist=True)
    value = state["step"]
    for _ in range(60):
        assert value[0] is value[1]
        value = value[0]
    assert value == []
