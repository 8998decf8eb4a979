"""Saves and loads do not depend on torch's default device and dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ckpt
from tests.support import StateDict, assert_equal, f32
from torch_ckpt.inspection.diff import diff


@contextmanager
def default_of(set_default: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    set_default(value)
    try:
        yield
    finally:
        set_default(before)


DEFAULTS: dict[str, Callable[[], Any]] = {
    "in a block of the meta device": lambda: torch.device("meta"),
    "default device meta": lambda: default_of(torch.set_default_device, "meta", None),
    "default dtype float64": lambda: default_of(
        torch.set_default_dtype, torch.float64, torch.float32
    ),
}


def state_of(seed: int) -> StateDict:
    return {
        "plain": f32(30, 40, seed=seed),
        "large": f32(300, 400, seed=seed)[:, ::3],
        "negated": f32(5, 6, seed=seed)._neg_view(),
        "object": (f32(3, seed=seed), "text"),
        "step": seed,
    }


Save = Callable[[StateDict, Path], Any]
SAVES: dict[str, Save] = {
    "save": partial(torch_ckpt.save, check_replicas="error"),
    "blocking": lambda s, path: torch_ckpt.async_save(s, path, staging="blocking").result(60),
    "overlapped": lambda s, path: torch_ckpt.async_save(s, path, staging="overlapped").result(60),
}


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("save", SAVES)
def test_a_save_writes_the_same_values(tmp_path: Path, save: str, default: str) -> None:
    state = state_of(1)
    with DEFAULTS[default]():
        SAVES[save](state, tmp_path)
    loaded = state_of(2)
    torch_ckpt.load(loaded, tmp_path)
    assert_equal(loaded, state_of(1))


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize(
    "arguments",
    [{}, {"free_before_read": True}, {"options": torch_ckpt.ReadOptions(zero_fill=True)}],
    ids=["", "free_before_read", "zero_fill"],
)
def test_a_load_reads_the_same_values(
    tmp_path: Path, arguments: dict[str, Any], default: str
) -> None:
    torch_ckpt.save(state_of(1), tmp_path)
    loaded = state_of(2)
    with DEFAULTS[default]():
        torch_ckpt.load(loaded, tmp_path, **arguments)
        assert torch_ckpt.verify(tmp_path).ok
        assert diff(tmp_path, tmp_path).equal
    assert_equal(loaded, state_of(1))


@pytest.mark.parametrize("default", DEFAULTS)
def test_meta_tensors_are_loaded_into_memory(tmp_path: Path, default: str) -> None:
    torch_ckpt.save(state_of(1), tmp_path)
    loaded = {"plain": torch.empty(30, 40, dtype=torch.float32, device="meta")}
    with DEFAULTS[default]():
        torch_ckpt.load(loaded, tmp_path)
    assert_equal(loaded["plain"], f32(30, 40, seed=1))
