"""Contract tests of other projects: torch's checks of states."""

from __future__ import annotations

import copy
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.testing._internal.distributed.common_state_dict import VerifyStateDictMixin

import torch_ckpt
from tests.support import assert_equal

pytestmark = pytest.mark.full


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
