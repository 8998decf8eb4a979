"""Events on streams, without a device; tests/python/api/test_cuda_states.py has one."""

from __future__ import annotations

import contextlib

import pytest
import torch

from torch_ckpt._base.cuda_events import record_events


def test_a_stream_whose_work_is_being_captured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    selected: list[torch.device] = []

    def select(device: torch.device) -> contextlib.AbstractContextManager[None]:
        selected.append(device)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "device", select)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: selected[-1].index == 1)
    with pytest.raises(RuntimeError, match="captured on the current stream of cuda:1"):
        record_events([torch.device("cuda:0"), torch.device("cuda:1")])
