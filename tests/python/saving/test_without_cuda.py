"""Saves by a build without CUDA on a machine with CUDA."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from torch_ckpt import _C
from torch_ckpt._base.cuda_build import warn_without_cuda
from torch_ckpt.megatron import calls_queue
from torch_ckpt.saving.items import as_value


class OnDevice(torch.Tensor):
    """Tensor that claims to be on a CUDA device."""

    is_cuda = True  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def no_cuda_in_the_build(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_C, "has_cuda", False)
    warn_without_cuda.cache_clear()
    yield
    warn_without_cuda.cache_clear()


def test_the_first_cuda_tensor_warns_and_names_the_toolkit() -> None:
    tensor = torch.arange(3).as_subclass(OnDevice)
    with pytest.warns(UserWarning, match=r"no CUDA support.*Rebuild torch_ckpt.*CUDA \w+"):
        value: Any = as_value(tensor)
    stored = torch.load(io.BytesIO(bytes(value)), weights_only=False)
    assert torch.equal(stored.as_subclass(torch.Tensor), torch.arange(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        as_value(tensor)


def test_megatrons_queue_reserves_memory_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        calls_queue, "reserve_pool", lambda _bytes, device, wait: devices.append(device)
    )
    calls_queue.AsyncCallsQueue.warmup_persistent_caller(0, reserve_bytes=1)
    assert devices == [None]
