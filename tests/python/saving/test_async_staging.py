"""torch's async_save with torch_ckpt's writer, which stages the state."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import torch_ckpt
from tests.background_saves import (
    OwnMapping,
    assert_checkpoint,
    everything,
    large,
    pool_bytes,
    spoil,
    unwritable,
)
from tests.support import (
    StateDict,
    assert_equal,
    random_tensor,
)
from torch_ckpt import Background
from torch_ckpt.saving.background import CHUNK_BYTES

# torch warns of every checkpoint that is replaced.
pytestmark = [
    pytest.mark.usefixtures("no_save_left"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]


def test_a_staged_copy_keeps_the_strides_of_dense_tensors(tmp_path: Path) -> None:
    tensor = random_tensor((4, 6), torch.float32).t()
    staged = torch_ckpt.FileSystemWriter(tmp_path).stage({"t": tensor})
    assert staged["t"].stride() == (1, 6)


def test_a_staged_copy_shares_no_memory_with_the_state(tmp_path: Path) -> None:
    state = everything()
    staged = torch_ckpt.FileSystemWriter(tmp_path).stage(state)
    spoil(state)
    assert_equal(staged, everything())


def test_staging_does_not_change_the_state(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    mapping = OwnMapping(p=parameter)
    torch_ckpt.FileSystemWriter(tmp_path).stage({"m": mapping, "o": OrderedDict(p=parameter)})
    assert mapping["p"] is parameter


@pytest.mark.usefixtures("empty_pool")
def test_the_memory_of_a_staged_copy_returns_to_the_pool(tmp_path: Path) -> None:
    writer = torch_ckpt.FileSystemWriter(tmp_path)
    kept = []
    for _ in range(3):
        staged = writer.stage({"a": large(), "b": [large()]})
        assert pool_bytes() == 0
        del staged["a"]
        assert pool_bytes() == 0
        del staged
        kept.append(pool_bytes())
    assert kept == [2 * 3 * CHUNK_BYTES] * 3


@pytest.mark.parametrize("by", ["storage_writer", "async_stager"])
def test_torchs_async_save_saves_a_snapshot(tmp_path: Path, by: str) -> None:
    state = everything() | {"large": large()}
    slow = Background(max_bytes_per_second=64 << 20)
    writer = torch_ckpt.FileSystemWriter(tmp_path / "c", background=slow)
    options: StateDict = {"storage_writer": writer}
    if by == "async_stager":
        options["async_stager"] = torch_ckpt.FileSystemWriter(tmp_path / "stager")
    future: Any = dcp_async_save(state, no_dist=True, **options)
    spoil(state)
    future.result()
    assert_checkpoint(tmp_path / "c", everything() | {"large": large()})


def test_torchs_async_save_raises_the_error_of_the_save(tmp_path: Path) -> None:
    writer = torch_ckpt.FileSystemWriter(unwritable(tmp_path))
    future: Any = dcp_async_save({"t": torch.ones(3)}, storage_writer=writer, no_dist=True)
    with pytest.raises(CheckpointException):
        future.result()


def test_the_writer_pickles_after_staging(tmp_path: Path) -> None:
    writer = torch_ckpt.FileSystemWriter(tmp_path / "c", background=Background(nice=3))
    writer.stage(everything())
    copy = pickle.loads(pickle.dumps(writer))
    dcp_save({"t": torch.ones(3)}, storage_writer=copy, no_dist=True)
    assert copy.background == Background(nice=3)
    assert_checkpoint(tmp_path / "c", {"t": torch.ones(3)})
