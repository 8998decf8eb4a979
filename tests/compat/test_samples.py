"""Samples of each release stay readable (make_samples.py writes them)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

import torch_ckpt
from tests.compat.make_samples import SAMPLES, write_samples
from tests.compat.values import emptied, model, state, whole
from tests.support import assert_equal

RELEASES = sorted(path.name for path in SAMPLES.iterdir())


@pytest.fixture(scope="module")
def new_samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("new") / "samples"
    write_samples(folder)
    return folder


@pytest.fixture(params=[*RELEASES, "this version"])
def samples(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Returns the folder of a copy of a release's samples, or of new ones."""
    is_new = request.param == "this version"
    source = request.getfixturevalue("new_samples") if is_new else SAMPLES / request.param
    return Path(shutil.copytree(source, tmp_path / "samples", symlinks=True))


def loaded(path: Path, expected: Any) -> Any:
    found = emptied(expected)
    torch_ckpt.load(found, path)
    return found


def test_a_checkpoint_is_loaded(samples: Path) -> None:
    assert torch_ckpt.verify(samples / "checkpoint").ok
    assert_equal(loaded(samples / "checkpoint", state()), state())


def test_a_checkpoint_of_dcp_is_loaded_by_stock_torch_too(samples: Path) -> None:
    assert torch_ckpt.verify(samples / "dcp").ok
    for reader in (torch_ckpt.FileSystemReader, dcp.FileSystemReader):
        found = emptied(model(1))
        dcp.load(found, storage_reader=reader(samples / "dcp"), no_dist=True)
        assert_equal(found, model(1))


def test_safetensors_files_are_loaded(samples: Path) -> None:
    assert torch_ckpt.verify(samples / "safetensors").ok
    assert_equal(loaded(samples / "safetensors", model(1)), model(1))


@pytest.mark.parametrize("name", ["ranks", "ranks_safetensors"])
def test_the_shards_of_two_ranks_are_loaded(samples: Path, name: str) -> None:
    assert torch_ckpt.verify(samples / name).ok
    assert_equal(loaded(samples / name, whole()), whole())


def test_a_manager_restores_the_newest_step(samples: Path) -> None:
    found = {"model": emptied(model(2))}
    with torch_ckpt.CheckpointManager(samples / "run") as manager:
        assert manager.restore(found) == 2
    assert_equal(found["model"], model(2))


def test_versions_and_deltas_are_loaded_and_applied(samples: Path) -> None:
    versions = samples / "versions"
    assert_equal(loaded(versions, model(2)), model(2))
    (delta,) = versions.glob("*2*/torch_ckpt.delta")
    changed = model(1)
    torch_ckpt.apply_delta(delta, changed)
    assert_equal(changed, model(2))


def test_the_samples_have_a_folder_for_this_release() -> None:
    assert torch_ckpt.__version__ in RELEASES
