"""Contract tests of other projects: fsspec's abstract tests, and torch's checks of states.

torch_ckpt implements no fsspec file system, but its tests of remote steps do. These stand for all
others, so they must keep fsspec's contract.
"""

from __future__ import annotations

import copy
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.tests import abstract
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.testing._internal.distributed.common_state_dict import VerifyStateDictMixin

import tests.remote_stores  # noqa: F401
import torch_ckpt
from tests.support import assert_equal

pytestmark = pytest.mark.full

# --- fsspec --------------------------------------------------------------------------------------


class _InMemory(abstract.AbstractFixtures):  # type: ignore[misc]
    protocol: str

    @pytest.fixture(scope="class")
    def fs(self) -> Iterator[Any]:
        files = fsspec.filesystem(self.protocol)
        before = dict(files.store), list(files.pseudo_dirs)
        files.store.clear()
        files.pseudo_dirs[:] = [""]
        yield files
        files.store.clear()
        files.store.update(before[0])
        files.pseudo_dirs[:] = before[1]

    @pytest.fixture
    def fs_join(self) -> Callable[..., str]:
        return lambda *parts: "/".join(parts)

    @pytest.fixture
    def fs_path(self) -> str:
        return ""


class TestHooked(
    _InMemory,
    abstract.AbstractCopyTests,  # type: ignore[misc]
    abstract.AbstractGetTests,  # type: ignore[misc]
    abstract.AbstractOpenTests,  # type: ignore[misc]
    abstract.AbstractPipeTests,  # type: ignore[misc]
    abstract.AbstractPutTests,  # type: ignore[misc]
):
    protocol = "hooked"


class TestWalked(TestHooked):
    protocol = "walked"


# --- torch ---------------------------------------------------------------------------------------


def _trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _load_by_dcp(state: dict[str, Any], path: Path) -> None:
    dcp.load(state, storage_reader=torch_ckpt.FileSystemReader(path), no_dist=True)


def _load(state: dict[str, Any], path: Path) -> None:
    torch_ckpt.load(state, path, no_dist=True)


@pytest.mark.parametrize("load", [_load, _load_by_dcp])
def test_a_loaded_state_passes_torchs_own_checks(
    tmp_path: Path, load: Callable[[dict[str, Any], Path], None]
) -> None:
    class Checks(VerifyStateDictMixin, unittest.TestCase):  # type: ignore[misc]
        def assertEqual(self, first: Any, second: Any, **_: Any) -> None:
            assert_equal(second, first)

    model, optimizer = _trained()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    torch_ckpt.save({"model": of_model, "optimizer": of_optimizer}, tmp_path, no_dist=True)
    loaded: dict[str, Any] = dict(
        zip(("model", "optimizer"), get_state_dict(*_trained()), strict=True)
    )
    load(loaded, tmp_path)
    checks = Checks()
    checks._verify_msd(model.state_dict(), loaded["model"])
    checks._verify_osd(model, optimizer, optimizer.state_dict(), loaded["optimizer"])
    fresh = copy.deepcopy(model)
    other = torch.optim.AdamW(fresh.parameters(), lr=0.5)
    checks._verify_osd_by_load(fresh, optimizer, other, loaded["optimizer"])
