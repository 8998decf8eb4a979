"""Metadata that lacks a location, and errors in the words of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

import torch_ckpt
from tests.loads import refusal
from tests.support import f32, load, save


@pytest.mark.parametrize("state", [{"b": torch.zeros(3)}, {"a": torch.zeros(4)}], ids=["b", "a"])
def test_a_mismatch_has_the_text_of_torch(tmp_path: Path, state: dict[str, Any]) -> None:
    save({"a": f32(3)}, tmp_path)
    stock = str(refusal(lambda: load(dict(state), tmp_path)))
    ours = str(refusal(lambda: torch_ckpt.load(dict(state), tmp_path)))
    assert stock.rstrip(".") in ours


def test_a_shard_without_a_location_in_the_metadata_is_named(tmp_path: Path) -> None:
    class Forgetful(torch_ckpt.FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            metadata = super().read_metadata(*args, **kwargs)
            metadata.storage_data.clear()
            return metadata

    save({"w": f32(3, 2)}, tmp_path)
    reader, state = Forgetful(tmp_path), {"w": torch.zeros(3, 2)}
    cause = refusal(lambda: dcp.load(state, storage_reader=reader, no_dist=True))
    expected = "w: the metadata gives no location for the shard at offset (0, 0); the save"
    assert str(cause).startswith(expected)


def test_a_reader_returns_metadata_of_torchs_class(tmp_path: Path) -> None:
    save({"w": f32(3)}, tmp_path)
    metadata = torch_ckpt.FileSystemReader(tmp_path).read_metadata()
    assert type(metadata) is Metadata
    stock = dcp.FileSystemReader(tmp_path).read_metadata()
    assert metadata.state_dict_metadata == stock.state_dict_metadata
