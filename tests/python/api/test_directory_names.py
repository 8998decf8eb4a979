"""Directories whose names are not UTF-8: checkpoints in them work as in any other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_ckpt
from tests.support import cause_of
from torch_ckpt import _core
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.lease import remove_leftovers

STATE = {"weight": torch.arange(10.0), "step": 3}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Makes a name in Latin-1, as in old archives and on other systems."""
    return Path(os.fsdecode(os.fsencode(tmp_path) + b"/r\xe9sum\xe9"))


def loaded(path: Path) -> dict[str, object]:
    state: dict[str, object] = {"weight": torch.zeros(10), "step": 0}
    torch_ckpt.load(state, path, no_dist=True)
    return state


def test_a_checkpoint_makes_the_round_trip(path: Path) -> None:
    torch_ckpt.save(STATE, path, no_dist=True)
    torch_ckpt.async_save(STATE, path, no_dist=True).result()
    found = loaded(path)
    assert torch.equal(found["weight"], STATE["weight"])  # type: ignore[arg-type]
    assert found["step"] == 3
    assert torch_ckpt.verify(path).ok
    assert remove_leftovers(path) == []


def test_steps_of_a_manager_make_the_round_trip(path: Path) -> None:
    state = {"weight": torch.arange(10.0)}
    with torch_ckpt.CheckpointManager(path) as manager:
        manager.save(1, state)
    state["weight"].zero_()
    with torch_ckpt.CheckpointManager(path) as manager:
        assert manager.restore(state) == 1
    assert torch.equal(state["weight"], torch.arange(10.0))


def test_an_error_has_the_name_as_python_writes_it(path: Path) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        OpenDirectory(path)
    assert missing.value.filename == str(path)
    torch_ckpt.save(STATE, path, no_dist=True, options=torch_ckpt.WriteOptions(thread_count=1))
    (file,) = (name for name in os.listdir(path) if name.endswith(".distcp"))
    os.truncate(path / file, 100)
    with pytest.raises(dcp.CheckpointException) as raised:
        loaded(path)
    assert str(path) in str(cause_of(raised.value))


def test_a_path_may_be_bytes_and_a_name_that_is_not_utf8_is_listed(path: Path) -> None:
    _core.make_directories(os.fsencode(path))
    (path / os.fsdecode(b"\xff")).touch()
    directory = OpenDirectory(os.fsencode(path))
    assert directory.path == str(path)
    assert directory.names() == ["\udcff"]
    directory.remove("\udcff")
    assert directory.names() == []


def test_the_command_line_shows_such_a_directory(
    path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    torch_ckpt.save(STATE, path, no_dist=True)
    from torch_ckpt.cli import main

    for command in ("ls", "verify", "show"):
        assert main([command, str(path)]) == 0, capfd.readouterr().err
