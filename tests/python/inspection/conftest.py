"""Checkpoints of one state, by torch_ckpt and by stock torch, and copies to damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support import (
    save,
    stock_save,
)
from tests.verified_checkpoints import STATE


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ours")
    save(STATE, path, thread_count=2)
    return path


@pytest.fixture(scope="module")
def stocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stocks")
    stock_save(STATE, path, thread_count=2)
    return path


@pytest.fixture(params=["ours", "stocks"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Makes a copy to damage."""
    path = tmp_path / "checkpoint"
    shutil.copytree(request.getfixturevalue(request.param), path)
    return path


@pytest.fixture
def our_copy(ours: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(ours, tmp_path / "checkpoint"))
