"""Metadata that a network file system has in a former state, or not yet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ckpt
from torch_ckpt.checkpoint import source
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.folders import LocalFolder
from torch_ckpt.checkpoint.shared_directory import View
from torch_ckpt.errors import Corrupt

Read = Callable[[LocalFolder, str, int], bytes]


@pytest.fixture
def on_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every file system a network file system. Nothing is stale for long."""
    monkeypatch.setattr(OpenDirectory, "is_local", False)
    monkeypatch.setattr(source, "PAUSE_SECONDS", 0.0)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch_ckpt.save({"t": torch.arange(4)}, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def stale_at_first(monkeypatch: pytest.MonkeyPatch, stale: Read) -> list[int]:
    """Makes the first two reads of metadata stale. Returns the descriptors of all reads."""
    fresh, opened = LocalFolder.read, []

    def read(folder: LocalFolder, name: str, limit: int) -> bytes:
        opened.append(folder.fd)
        return (stale if len(opened) <= 2 else fresh)(folder, name, limit)

    monkeypatch.setattr(LocalFolder, "read", read)
    return opened


def truncated(folder: LocalFolder, name: str, limit: int) -> bytes:
    path = Path(folder.path, name)
    return path.read_bytes()[:-10]


def missing(_folder: LocalFolder, _name: str, _limit: int) -> bytes:
    raise FileNotFoundError


def loaded(path: Path) -> list[int]:
    target: dict[str, Any] = {"t": torch.zeros(4, dtype=torch.int64)}
    torch_ckpt.load(target, path)
    found: list[int] = target["t"].tolist()
    return found


@pytest.mark.usefixtures("on_network")
@pytest.mark.parametrize("stale", [truncated, missing])
def test_stale_metadata_on_a_network_file_system_is_read_again(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, stale: Read
) -> None:
    opened = stale_at_first(monkeypatch, stale)
    assert loaded(checkpoint) == [0, 1, 2, 3]
    assert len(opened) == 3


@pytest.mark.usefixtures("on_network")
def test_metadata_that_stays_damaged_is_reported(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "STALE_SECONDS", 0.05)
    metadata = checkpoint / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:-10])
    with pytest.raises(Corrupt):
        torch_ckpt.open(checkpoint)


@pytest.mark.parametrize("stale", [truncated, missing])
def test_damage_on_a_local_file_system_is_reported_at_once(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, stale: Read
) -> None:
    assert View.of(OpenDirectory(checkpoint)).is_local
    opened = stale_at_first(monkeypatch, stale)
    with pytest.raises((Corrupt, FileNotFoundError)):
        torch_ckpt.open(checkpoint)
    assert len(opened) == 1


@pytest.mark.usefixtures("on_network")
@pytest.mark.parametrize("exists", [False, True], ids=["absent", "empty"])
def test_a_directory_without_a_checkpoint_is_reported_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    if exists:
        (tmp_path / "empty").mkdir()
    opened = stale_at_first(monkeypatch, missing)
    with pytest.raises(FileNotFoundError, match="no committed checkpoint"):
        torch_ckpt.open(tmp_path / "empty")
    assert len(opened) == int(exists)
