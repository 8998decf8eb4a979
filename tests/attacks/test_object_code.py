"""An object's pickle calls a function.

The attacker wants to run code on the loading machine. DCP's planner calls
``torch.load(weights_only=False)`` for every object, so an allow-list for ``.metadata`` is not
enough. Our readers must reject the object on every path, whatever the planner.
"""

from __future__ import annotations

import functools
import io
import operator
import os
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import ReadItem

import torch_ckpt
from tests.attacks.support import Attack, Calls, Checkpoint, record_of_object
from tests.support import cause_of
from torch_ckpt import Unsafe


def storing(make: Any) -> Attack:
    return lambda c: c.replace_record("step", record_of_object(make(c)))


ATTACKS: dict[str, Attack] = {
    "object: os.system": storing(lambda c: c.make_payload()),
    "object: eval": storing(lambda c: Calls(eval, f"open({str(c.canary)!r}, 'w')")),
    "object: torch.load": storing(lambda c: Calls(torch.load, str(c.data))),
    "object: functools.partial": storing(
        lambda c: Calls(functools.partial, os.system, f"touch {c.canary}")
    ),
    "object: operator.methodcaller": storing(lambda c: operator.methodcaller("unlink")),
    "object: a default factory that runs": storing(
        lambda c: Calls(__import__("collections").defaultdict, c.make_payload())
    ),
    "object: a size that is negative": storing(lambda c: Calls(torch.Size, (-1,))),
    "object: a size that is no number": storing(lambda c: Calls(torch.Size, (True,))),
    "object: deep inside": storing(lambda c: {"a": [(1, {"b": c.make_payload()})]}),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_attack_is_rejected(checkpoint: Checkpoint, attack: str) -> None:
    ATTACKS[attack](checkpoint)
    checkpoint.assert_stopped(attack, Unsafe, ls=0, message="step: the object in other.distcp")


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.torture
def test_the_outcome_of_stock_torch_is_recorded(checkpoint: Checkpoint, attack: str) -> None:
    ATTACKS[attack](checkpoint)
    checkpoint.record_stock(attack)


class Unpickling(dcp.DefaultLoadPlanner):
    """A user-defined planner that unpickles all objects."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=False)


@pytest.mark.parametrize(
    "planner", [Unpickling, lambda: dcp.DefaultLoadPlanner(flatten_state_dict=False)]
)
def test_no_planner_gets_the_object(checkpoint: Checkpoint, planner: Any) -> None:
    ATTACKS["object: os.system"](checkpoint)
    reader = torch_ckpt.FileSystemReader(checkpoint.path)
    with pytest.raises(dcp.CheckpointException) as error:
        dcp.load(checkpoint.targets(), storage_reader=reader, planner=planner(), no_dist=True)
    assert isinstance(cause_of(error.value), Unsafe)
    assert not checkpoint.canary.exists()


def test_a_load_with_free_before_read_rejects_the_object(checkpoint: Checkpoint) -> None:
    ATTACKS["object: os.system"](checkpoint)
    with pytest.raises(dcp.CheckpointException) as error:
        torch_ckpt.load(checkpoint.targets(), checkpoint.path, free_before_read=True, no_dist=True)
    assert isinstance(cause_of(error.value), Unsafe)
    assert not checkpoint.canary.exists()


def test_an_object_behind_a_stream_transform_is_rejected(checkpoint: Checkpoint) -> None:
    # torch's own code reads transformed records.
    ATTACKS["object: os.system"](checkpoint)
    checkpoint.location("step").transform_descriptors = []
    for descriptors in ([], ["stream.zstd"]):
        checkpoint.location("step").transform_descriptors = descriptors
        checkpoint.publish()
        with pytest.raises(dcp.CheckpointException):
            torch_ckpt.load(checkpoint.targets(), checkpoint.path, no_dist=True)
        assert not checkpoint.canary.exists()


def test_an_object_on_a_user_defined_file_system_is_rejected(checkpoint: Checkpoint) -> None:
    class Remote(dcp.filesystem.FileSystem):
        """A file system such as fsspec's, which torch's own code reads."""

    ATTACKS["object: os.system"](checkpoint)
    reader = torch_ckpt.FileSystemReader(checkpoint.path)
    reader.fs = Remote()
    with pytest.raises(dcp.CheckpointException) as error:
        dcp.load(checkpoint.targets(), storage_reader=reader, no_dist=True)
    assert isinstance(cause_of(error.value), Unsafe)
    assert not checkpoint.canary.exists()


def test_allow_pickle_runs_the_payload(checkpoint: Checkpoint) -> None:
    # Otherwise the other tests would prove nothing.
    ATTACKS["object: os.system"](checkpoint)
    torch_ckpt.load(
        checkpoint.targets(),
        checkpoint.path,
        no_dist=True,
        options=torch_ckpt.ReadOptions(allow_pickle=True),
    )
    assert checkpoint.canary.exists()
