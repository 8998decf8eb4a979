"""An object's pickle calls a function.

The attacker wants to run code on the machine that loads. DCP's planner calls
``torch.load(weights_only=False)`` on every object, so that an allow-list for ``.metadata`` alone
stops nobody. Here the object must be refused, whoever is to receive it and by whichever way.
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
    "object: os.system": storing(lambda c: c.touches_canary()),
    "object: eval": storing(lambda c: Calls(eval, f"open({str(c.canary)!r}, 'w')")),
    "object: torch.load": storing(lambda c: Calls(torch.load, str(c.data))),
    "object: functools.partial": storing(
        lambda c: Calls(functools.partial, os.system, f"touch {c.canary}")
    ),
    "object: operator.methodcaller": storing(lambda c: operator.methodcaller("unlink")),
    "object: a default factory that runs": storing(
        lambda c: Calls(__import__("collections").defaultdict, c.touches_canary())
    ),
    "object: deep inside": storing(lambda c: {"a": [(1, {"b": c.touches_canary()})]}),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_it_is_refused(checkpoint: Checkpoint, attack: str) -> None:
    ATTACKS[attack](checkpoint)
    checkpoint.assert_stopped(attack, Unsafe, ls=0, says="step: the object in other.distcp")


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.torture
def test_what_stock_does(checkpoint: Checkpoint, attack: str) -> None:
    ATTACKS[attack](checkpoint)
    checkpoint.note_stock(attack)


class Unpickling(dcp.DefaultLoadPlanner):
    """One of the user's own, which trusts what it gets."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=False)


@pytest.mark.parametrize(
    "planner", [Unpickling, lambda: dcp.DefaultLoadPlanner(flatten_state_dict=False)]
)
def test_no_planner_gets_it(checkpoint: Checkpoint, planner: Any) -> None:
    ATTACKS["object: os.system"](checkpoint)
    reader = torch_ckpt.FileSystemReader(checkpoint.path)
    with pytest.raises(dcp.CheckpointException) as error:
        dcp.load(checkpoint.targets(), storage_reader=reader, planner=planner(), no_dist=True)
    assert isinstance(cause_of(error.value), Unsafe)
    assert not checkpoint.canary.exists()


def test_a_load_that_frees_first_refuses_it(checkpoint: Checkpoint) -> None:
    ATTACKS["object: os.system"](checkpoint)
    with pytest.raises(dcp.CheckpointException) as error:
        torch_ckpt.load(checkpoint.targets(), checkpoint.path, free_before_read=True, no_dist=True)
    assert isinstance(cause_of(error.value), Unsafe)
    assert not checkpoint.canary.exists()


def test_one_behind_a_stream_transform_is_refused(checkpoint: Checkpoint) -> None:
    # What was transformed is read by torch's own code.
    ATTACKS["object: os.system"](checkpoint)
    checkpoint.place("step").transform_descriptors = []
    for descriptors in ([], ["stream.zstd"]):
        checkpoint.place("step").transform_descriptors = descriptors
        checkpoint.publish()
        with pytest.raises(dcp.CheckpointException):
            torch_ckpt.load(checkpoint.targets(), checkpoint.path, no_dist=True)
        assert not checkpoint.canary.exists()


def test_one_on_a_file_system_of_the_users_own_is_refused(checkpoint: Checkpoint) -> None:
    class Remote(dcp.filesystem.FileSystem):
        """As one of fsspec's: read by torch's own code."""

    ATTACKS["object: os.system"](checkpoint)
    reader = torch_ckpt.FileSystemReader(checkpoint.path)
    reader.fs = Remote()
    with pytest.raises(dcp.CheckpointException) as error:
        dcp.load(checkpoint.targets(), storage_reader=reader, no_dist=True)
    assert isinstance(cause_of(error.value), Unsafe)
    assert not checkpoint.canary.exists()


def test_a_trusted_writers_object_runs(checkpoint: Checkpoint) -> None:
    # Or nothing here would prove anything.
    ATTACKS["object: os.system"](checkpoint)
    torch_ckpt.load(checkpoint.targets(), checkpoint.path, no_dist=True, allow_pickle=True)
    assert checkpoint.canary.exists()
