"""The refusal during a capture, without a device; tests/python/api/test_cuda_states.py has one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_ckpt

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


def stage(path: Path) -> None:
    torch_ckpt.FileSystemWriter(path).stage(STATE)


@pytest.mark.parametrize(
    "call",
    [
        lambda path: torch_ckpt.save({"model": Untouched()}, path),
        lambda path: torch_ckpt.async_save({"model": Untouched()}, path),
        lambda path: torch_ckpt.load({"model": Untouched()}, path.with_name("before")),
        lambda path: dcp_save(path),
        lambda path: dcp_load(path.with_name("before")),
        stage,
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
