"""Metadata of a save on the ranks that have not written it."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
import torch

import torch_ckpt
from torch_ckpt import CheckpointError, _core
from torch_ckpt.checkpoint.lazy_metadata import MOST_BYTES_SENT, SavedMetadata


def sent(path: Path, ranks: int) -> bytes:
    """Returns the message with which the coordinator sends the metadata of a saved tensor."""
    torch_ckpt.save({"weight": torch.arange(4)}, path)
    data = _core.EncodedMetadata((path / ".metadata").read_bytes())
    return pickle.dumps(SavedMetadata(data, str(path), ranks))


@pytest.mark.parametrize("ranks", [2, MOST_BYTES_SENT], ids=["few", "many"])
def test_metadata_is_sent_to_few_ranks_and_read_lazily_by_many(tmp_path: Path, ranks: int) -> None:
    message = sent(tmp_path / "gone", ranks)
    if ranks == 2:
        shutil.rmtree(tmp_path / "gone")
    else:
        assert len(message) < 500
    assert set(pickle.loads(message).metadata().state_dict_metadata) == {"weight"}


def test_metadata_that_was_replaced_or_deleted_is_refused(tmp_path: Path) -> None:
    replaced = pickle.loads(sent(tmp_path, MOST_BYTES_SENT)).metadata()
    torch_ckpt.save({"weight": torch.arange(4)}, tmp_path)
    with pytest.raises(CheckpointError, match="another save has replaced"):
        replaced.state_dict_metadata  # noqa: B018
    gone = pickle.loads(sent(tmp_path / "gone", MOST_BYTES_SENT)).metadata()
    shutil.rmtree(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="gone no longer exists"):
        gone.state_dict_metadata  # noqa: B018


def test_the_rank_that_has_committed_keeps_the_metadata(tmp_path: Path) -> None:
    path = tmp_path / "gone"
    torch_ckpt.save({"weight": torch.arange(4)}, path)
    data = _core.EncodedMetadata((path / ".metadata").read_bytes())
    saved = SavedMetadata(data, str(path), MOST_BYTES_SENT)
    shutil.rmtree(path)
    assert set(saved.metadata().state_dict_metadata) == {"weight"}
