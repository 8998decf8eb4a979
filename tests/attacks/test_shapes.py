"""The metadata or a record gives a tensor another shape or dtype than its data.

The attacker wants products to overflow, memory to be allocated without data, bytes outside of the
storage to be read as weights, or a planner to run for hours.
"""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from tests.attacks.support import Attack, Checkpoint, replaced
from tests.support import record_of
from torch_ckpt import Corrupt

MANY = 1_000_000


def sized(*size: int) -> Attack:
    def attack(c: Checkpoint) -> None:
        c.save_with_torch()
        offsets = torch.Size([0] * len(size))
        chunk = ChunkStorageMetadata(offsets, torch.Size(size))
        replaced(c.metadata, "weight", size=torch.Size(size), chunks=[chunk])
        c.publish()

    return attack


def size_of_type(size: Any) -> Attack:
    def attack(c: Checkpoint) -> None:
        replaced(c.metadata, "weight", size=size)
        c.publish()

    return attack


def dtype_of_type(dtype: Any) -> Attack:
    def attack(c: Checkpoint) -> None:
        properties = c.metadata.state_dict_metadata["weight"].properties
        replaced(c.metadata, "weight", properties=dataclasses.replace(properties, dtype=dtype))
        c.publish()

    return attack


def chunked(*chunks: Any) -> Attack:
    def attack(c: Checkpoint) -> None:
        c.save_with_torch()
        replaced(c.metadata, "weight", chunks=list(chunks))
        c.publish()

    return attack


def chunk(offsets: Any, sizes: Any) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def many_chunks(count: int) -> Attack:
    # The same object many times takes two bytes of metadata each.
    return chunked(*[chunk((0, 0), (1, 1))] * count)


AT_ONCE: dict[str, Attack] = {
    "shape: the product overflows": sized(2**31, 2**31, 2**31),
    "shape: the bytes overflow": sized(2**31, 2**30),
    "shape: the product overflows to 0": sized(2**32, 2**32),
    "shape: 65 dimensions": sized(*[1] * 65),
    "shape: of floats": size_of_type((3.0, 4.0)),
    "shape: a list": size_of_type([3, 4]),
    "shape: a str": size_of_type("ab"),
    "shape: negative": sized(-3, -4),
    "dtype: a str": dtype_of_type("float32"),
    "dtype: a Size": dtype_of_type(torch.Size([1])),
    "shards: past the tensor": chunked(chunk((1, 0), (3, 4))),
    "shards: of other dimensions": chunked(chunk((0,), (12,))),
    "shards: a wrapping offset": chunked(chunk((2**63 - 1, 0), (2, 4))),
    "shards: twice the same": chunked(chunk((0, 0), (3, 4)), chunk((0, 0), (3, 4))),
    "shards: five thousand": many_chunks(5000),
    "shards: of another type": chunked((0, 0)),
}


@pytest.mark.parametrize("attack", AT_ONCE)
def test_the_attack_is_rejected_when_the_metadata_is_read(
    checkpoint: Checkpoint, attack: str
) -> None:
    AT_ONCE[attack](checkpoint)
    checkpoint.assert_stopped(attack, Corrupt, message="weight: ")


def test_a_million_shards_are_rejected(checkpoint: Checkpoint) -> None:
    many_chunks(MANY)(checkpoint)
    checkpoint.assert_stopped("shards: a million", Corrupt, message="shared parts are counted")


def small_storage(c: Checkpoint) -> None:
    # With strides of 0, one element is the value of all.
    stored = torch.ones(1).expand(3, 4)

    stream = io.BytesIO()
    torch.save(stored, stream)
    c.replace_record("weight", stream.getvalue())


def past_the_storage(c: Checkpoint) -> None:
    record = record_of(torch.arange(12.0).reshape(3, 4))
    # The strides (4, 1) in the pickle.
    assert record.count(b"K\x04K\x01\x86") == 1
    c.replace_record("weight", record.replace(b"K\x04K\x01\x86", b"K\xffK\x01\x86"))


def other_shape(c: Checkpoint) -> None:
    c.replace_record("weight", record_of(torch.ones(4, 3)))


def incomplete(c: Checkpoint) -> None:
    # torch publishes such metadata when a thread of its writer fails.
    chunked(chunk((0, 0), (2, 4)))(c)


def no_chunks(c: Checkpoint) -> None:
    chunked()(c)


WHILE_READING: dict[str, Attack] = {
    "shape: past the storage": past_the_storage,
    "shape: other than in the metadata": other_shape,
    "shards: one is missing": incomplete,
    "shards: all are missing": no_chunks,
}


@pytest.mark.parametrize("attack", WHILE_READING)
def test_the_attack_is_rejected_by_name(checkpoint: Checkpoint, attack: str) -> None:
    WHILE_READING[attack](checkpoint)
    checkpoint.assert_stopped(attack, Corrupt, ls=0, unchanged=False, message="weight: ")


@pytest.mark.parametrize("attack", AT_ONCE | WHILE_READING)
@pytest.mark.torture
def test_the_outcome_of_stock_torch_is_recorded(checkpoint: Checkpoint, attack: str) -> None:
    (AT_ONCE | WHILE_READING)[attack](checkpoint)
    checkpoint.record_stock(attack)


def test_a_storage_smaller_than_its_tensor_uses_only_the_memory_of_the_target(
    checkpoint: Checkpoint,
) -> None:
    # The caller chose the size of the target.
    small_storage(checkpoint)
    state = checkpoint.targets()
    checkpoint._our_load(state)
    assert torch.equal(state["weight"], torch.ones(3, 4))


def test_a_record_of_another_dtype_is_converted(checkpoint: Checkpoint) -> None:
    # torch does the same, because a planner may have stored the tensor so.
    checkpoint.replace_record("weight", record_of(torch.ones(3, 4, dtype=torch.int32)))
    state = checkpoint.targets()
    checkpoint._our_load(state)
    assert torch.equal(state["weight"], torch.ones(3, 4))
