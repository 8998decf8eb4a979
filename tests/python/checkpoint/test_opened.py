"""The checkpoint that a save returns."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

import torch_ckpt
from tests.support import open_descriptors
from torch_ckpt import CheckpointError

STATE = {"weight": torch.arange(4)}


def test_metadata_is_read_on_demand(tmp_path: Path) -> None:
    saved = torch_ckpt.save(STATE, tmp_path / "c")
    assert set(saved.metadata().state_dict_metadata) == {"weight"}
    (tmp_path / "c").rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match="no committed checkpoint"):
        saved.metadata()


def test_the_metadata_of_a_later_save_is_refused(tmp_path: Path) -> None:
    first = torch_ckpt.save(STATE, tmp_path)
    second = torch_ckpt.async_save(STATE, tmp_path).result()
    with pytest.raises(CheckpointError, match="another save has replaced"):
        first.metadata()
    assert set(second.metadata().state_dict_metadata) == {"weight"}


def test_a_checkpoint_keeps_no_file_open(tmp_path: Path) -> None:
    before = open_descriptors()
    saved = torch_ckpt.save(STATE, tmp_path / "c")
    saved.metadata()
    assert open_descriptors() <= before


def test_a_checkpoint_can_be_pickled(tmp_path: Path) -> None:
    saved = pickle.loads(pickle.dumps(torch_ckpt.save(STATE, tmp_path)))
    assert saved.path == str(tmp_path)
    assert set(saved.metadata().state_dict_metadata) == {"weight"}
