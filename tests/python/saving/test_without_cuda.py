"""Saves without a CUDA runtime, and simulated captures of CUDA graphs (real ones are in
test_cuda_states.py)."""

from __future__ import annotations

import io
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_ckpt
from torch_ckpt import _C
from torch_ckpt.megatron import calls_queue
from torch_ckpt.saving import host_memory
from torch_ckpt.saving.items import as_value, warn_without_cuda

# --- no CUDA runtime that the engine can use ---------------------------------------------------


class OnDevice(torch.Tensor):
    """Tensor that claims to be on a CUDA device."""

    is_cuda = True  # type: ignore[assignment]


@pytest.fixture
def no_cuda_runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_C, "has_cuda", False)
    monkeypatch.setattr(_C, "no_cuda_reason", "the CUDA runtime has no function cudaGetDevice")
    warn_without_cuda.cache_clear()
    yield
    warn_without_cuda.cache_clear()


@pytest.mark.usefixtures("no_cuda_runtime")
def test_the_first_cuda_tensor_warns_and_names_the_reason() -> None:
    tensor = torch.arange(3).as_subclass(OnDevice)
    with pytest.warns(
        UserWarning, match=r"no CUDA runtime.*no function cudaGetDevice.*Install torch"
    ):
        value: Any = as_value("t", tensor)
    stored = torch.load(io.BytesIO(bytes(value)), weights_only=False)
    assert torch.equal(stored.as_subclass(torch.Tensor), torch.arange(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        as_value("t", tensor)


@pytest.mark.parametrize(
    ("cuda", "reason"),
    [
        (None, "this torch was built without CUDA"),
        ("11.8", "torch has not loaded libcudart.so.11"),
    ],
)
def test_the_reason_names_what_is_missing(cuda: str | None, reason: str) -> None:
    program = (
        f"import torch; torch.version.cuda = {cuda!r}; from torch_ckpt import _C; "
        "print(_C.has_cuda, _C.no_cuda_reason)"
    )
    printed = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert printed == f"False {reason}\n"


@pytest.mark.usefixtures("no_cuda_runtime")
def test_megatrons_queue_reserves_memory_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        host_memory.reserve, "make_or_log", lambda _bytes, device: devices.append(device)
    )

    class Queue(calls_queue.AsyncCallsQueue):
        """Queue class whose priorities no other test uses."""

    Queue.warmup_persistent_caller(0, reserve_bytes=1)
    assert devices == [None]


# --- the capture of a CUDA graph -----------------------------------------------------------------

STATE = {"w": torch.zeros(4)}


class Untouched:
    """A value whose state must not be asked for: that may copy from the device."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        raise AssertionError

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        raise AssertionError


def dcp_save(path: Path) -> None:
    dcp.save(STATE, storage_writer=torch_ckpt.FileSystemWriter(path), no_dist=True)


def dcp_load(path: Path) -> None:
    dcp.load(STATE, storage_reader=torch_ckpt.FileSystemReader(path), no_dist=True)


@pytest.mark.parametrize(
    "call",
    [
        lambda path: torch_ckpt.save({"model": Untouched()}, path),
        lambda path: torch_ckpt.async_save({"model": Untouched()}, path),
        lambda path: torch_ckpt.load({"model": Untouched()}, path.with_name("before")),
        dcp_save,
        lambda path: dcp_load(path.with_name("before")),
        lambda path: torch_ckpt.FileSystemWriter(path).stage(STATE),
    ],
    ids=["save", "async_save", "load", "dcp.save", "dcp.load", "stage"],
)
def test_a_call_during_a_capture_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[Path], object]
) -> None:
    torch_ckpt.save(STATE, tmp_path / "before")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises((RuntimeError, dcp.CheckpointException), match="captures a CUDA graph"):
        call(tmp_path / "c")
    assert not (tmp_path / "c" / ".metadata").exists()


def test_a_device_with_an_error_does_not_prevent_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", fail)
    torch_ckpt.save(STATE, tmp_path / "c")
    assert (tmp_path / "c" / ".metadata").exists()
