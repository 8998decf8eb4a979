"""Saves from and loads to a CUDA device, if there is one; fake_device.h simulates one elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ckpt
from torch_ckpt import _C
from torch_ckpt._base import cuda_events

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and _C.has_cuda),
    reason="no CUDA device, or the extension was built without CUDA",
)

StateDict = dict[str, Any]

# Long enough to detect copies that do not wait for it: some milliseconds of a device.
_SPIN_CYCLES = 50_000_000


def state() -> StateDict:
    generator = torch.Generator("cuda").manual_seed(7)
    large = torch.randn(1000, 3000, device="cuda", generator=generator)
    return {
        "large": large,
        "half": large[:10].to(torch.bfloat16),
        "view": large[5:700],
        "transposed": large[:64, :64].t().contiguous().t(),
        "with gaps": large[:, ::3],
        "scalar": torch.tensor(3.0, device="cuda"),
        "empty": torch.empty(0, 4, device="cuda"),
        "on the host": torch.arange(100),
        "step": 3,
    }


def on_host(values: StateDict) -> StateDict:
    return {k: v.cpu().clone() if isinstance(v, torch.Tensor) else v for k, v in values.items()}


def targets_like(expected: StateDict) -> StateDict:
    """Makes tensors of the same dtypes, strides and devices with other values."""
    return {
        k: torch.full_like(v, -1) if isinstance(v, torch.Tensor) else None
        for k, v in expected.items()
    }


def assert_equals(found: StateDict, expected: StateDict) -> None:
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value


def assert_holds(path: Path, expected: StateDict) -> None:
    found = targets_like(expected)
    torch_ckpt.load(found, path)
    assert_equals(found, expected)


def spin() -> None:
    """Keeps the current stream busy."""
    torch.cuda._sleep(_SPIN_CYCLES)


@pytest.mark.parametrize("staging", ["blocking", "overlapped"])
@pytest.mark.parametrize("max_host_bytes", [None, 1 << 20])
def test_a_save_takes_a_snapshot(tmp_path: Path, staging: str, max_host_bytes: int | None) -> None:
    values = state()
    expected = on_host(values)
    handle = torch_ckpt.async_save(
        values,
        tmp_path / "c",
        staging=staging,
        options=torch_ckpt.WriteOptions(max_host_bytes=max_host_bytes),
    )
    handle.wait_staged()
    for value in values.values():
        if isinstance(value, torch.Tensor) and value.numel():
            value.fill_(9)
    handle.result()
    assert_holds(tmp_path / "c", expected)


@pytest.mark.parametrize("is_async", [True, False])
def test_a_save_waits_for_work_queued_before_it(tmp_path: Path, is_async: bool) -> None:
    tensor = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        spin()
        tensor.fill_(5)
        if is_async:
            torch_ckpt.async_save({"t": tensor}, tmp_path / "c").result()
        else:
            torch_ckpt.save({"t": tensor}, tmp_path / "c")
    assert_holds(tmp_path / "c", {"t": torch.full((1 << 20,), 5.0)})


def test_a_guarded_step_does_not_reach_the_checkpoint(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(1 << 22, device="cuda"))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for number in range(3):
        expected = on_host({"p": parameter.detach()})
        spin()
        handle = torch_ckpt.async_save(
            {"p": parameter}, tmp_path / str(number), staging="overlapped"
        )
        handle.guard(optimizer)
        optimizer.step()
        handle.result()
        assert_holds(tmp_path / str(number), expected)


def test_sources_may_be_freed_after_the_call(tmp_path: Path) -> None:
    values = {"t": torch.full((1 << 22,), 3.0, device="cuda")}
    spin()
    handle = torch_ckpt.async_save(values, tmp_path / "c", staging="overlapped")
    values.clear()
    # The caching allocator reuses freed memory at once.
    others = [torch.full((1 << 22,), 4.0, device="cuda") for _ in range(4)]
    handle.result()
    assert others
    assert_holds(tmp_path / "c", {"t": torch.full((1 << 22,), 3.0)})


def test_dense_tensors_take_no_device_memory(tmp_path: Path) -> None:
    values = {str(i): torch.randn(1 << 20, device="cuda") for i in range(8)}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch_ckpt.async_save(values, tmp_path / "c", staging="overlapped").result()
    assert torch.cuda.max_memory_allocated() == before
    assert torch.cuda.memory_allocated() == before


# --- loads ---------------------------------------------------------------------------------------


def assert_loads(path: Path, values: torch.Tensor, target: torch.Tensor, **options: Any) -> None:
    torch_ckpt.load({"weight": target}, path, **options)
    assert torch.equal(target.cpu(), values.to(target.dtype))


@pytest.fixture
def values(tmp_path: Path) -> torch.Tensor:
    """Makes host values that are saved as "weight"."""
    made = torch.randn(1000, 3000) * 100
    torch_ckpt.save({"weight": made}, tmp_path)
    return made


@pytest.mark.parametrize("verify", [True, False])
def test_every_kind_of_tensor_is_loaded_to_the_device(tmp_path: Path, verify: bool) -> None:
    expected = state()
    torch_ckpt.save(expected, tmp_path)
    found = targets_like(expected)
    found["with gaps"] = torch.zeros_like(expected["large"])[:, ::3]
    torch_ckpt.load(found, tmp_path, options=torch_ckpt.ReadOptions(verify=verify))
    assert_equals(found, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32], ids=str)
def test_values_are_converted_before_they_are_sent(
    tmp_path: Path, values: torch.Tensor, dtype: torch.dtype
) -> None:
    assert_loads(tmp_path, values, torch.zeros(values.shape, dtype=dtype, device="cuda"))


def test_thousands_of_small_tensors_are_converted_and_sent(tmp_path: Path) -> None:
    # Separate allocations of 512 bytes: neighbours in memory are different tensors' storages.
    values = {f"weight {i}": torch.full((256,), float(i % 256)) for i in range(20_000)}
    torch_ckpt.save(values, tmp_path)
    found: StateDict = {
        name: torch.zeros(256, dtype=torch.bfloat16, device="cuda") for name in values
    }
    torch_ckpt.load(found, tmp_path)
    expected = {name: value.to(torch.bfloat16) for name, value in values.items()}
    assert_equals(on_host(found), expected)


def test_a_load_waits_for_the_current_streams_work_on_its_targets(
    tmp_path: Path, values: torch.Tensor
) -> None:
    target = torch.zeros(values.shape, device="cuda")
    spin()
    target.fill_(7)
    assert_loads(tmp_path, values, target)


def test_a_load_uses_at_most_two_chunks_for_each_thread(
    tmp_path: Path, values: torch.Tensor
) -> None:
    target = torch.zeros(values.shape, device="cuda")
    assert_loads(tmp_path, values, target, max_inflight_bytes=2 << 20)
    before = torch.cuda.max_memory_allocated()
    torch_ckpt.load({"weight": target}, tmp_path)
    assert torch.cuda.max_memory_allocated() == before


def test_a_temporary_is_not_written_before_work_that_still_reads_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: torch.Tensor
) -> None:
    # Spread on the device, through a temporary of 1000 x 3000.
    target = torch.zeros(3000, 1000, device="cuda").t()
    copies: list[torch.Tensor] = []
    record = cuda_events.record_events

    def record_and_free(devices: Any) -> Any:
        events = record(devices)
        block = torch.full((1000, 3000), 7.0, device="cuda")
        spin()
        copies.append(block.clone())
        return events

    monkeypatch.setattr("torch_ckpt.loading.reader.record_events", record_and_free)
    assert_loads(tmp_path, values, target)
    assert torch.equal(copies[0].cpu(), torch.full((1000, 3000), 7.0))
