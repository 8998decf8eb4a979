"""Saves from and loads to a CUDA device, where there is one; fake_device.h stands in elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ckpt
from tests.fresh import in_fresh_process
from torch_ckpt import _C
from torch_ckpt.loading import reader

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and _C.has_cuda),
    reason="no CUDA device, or the extension was built without CUDA",
)

StateDict = dict[str, Any]

# Long enough for copies that do not wait for it to be caught: some milliseconds of a device.
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


def assert_holds(path: Path, expected: StateDict) -> None:
    found = {
        k: torch.full_like(v, -1) if isinstance(v, torch.Tensor) else None
        for k, v in expected.items()
    }
    torch_ckpt.load(found, path)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value


def spin() -> None:
    """Keeps the current stream busy."""
    torch.cuda._sleep(_SPIN_CYCLES)


@pytest.mark.parametrize("staging", ["blocking", "overlapped"])
@pytest.mark.parametrize("max_host_bytes", [None, 1 << 20])
def test_what_was_there_at_the_call_is_saved(
    tmp_path: Path, staging: str, max_host_bytes: int | None
) -> None:
    values = state()
    expected = on_host(values)
    handle = torch_ckpt.async_save(
        values, tmp_path / "c", staging=staging, max_host_bytes=max_host_bytes
    )
    handle.wait_staged()
    for value in values.values():
        if isinstance(value, torch.Tensor) and value.numel():
            value.fill_(9)
    handle.result()
    assert_holds(tmp_path / "c", expected)


def test_work_queued_before_the_call_is_waited_for(tmp_path: Path) -> None:
    tensor = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        spin()
        tensor.fill_(5)
        torch_ckpt.async_save({"t": tensor}, tmp_path / "c").result()
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
    # The caching allocator hands freed memory out at once.
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


def test_a_synchronous_save_waits_for_the_current_stream(tmp_path: Path) -> None:
    tensor = torch.zeros(1 << 20, device="cuda")
    spin()
    tensor.fill_(5)
    torch_ckpt.save({"t": tensor}, tmp_path / "c")
    assert_holds(tmp_path / "c", {"t": torch.full((1 << 20,), 5.0)})


# --- loads ---------------------------------------------------------------------------------------


def targets_like(expected: StateDict) -> StateDict:
    """Tensors of the same dtypes, strides and devices, of other values."""
    return {
        k: torch.full_like(v, -1) if isinstance(v, torch.Tensor) else None
        for k, v in expected.items()
    }


@pytest.mark.parametrize("verify", [True, False])
def test_every_kind_of_tensor_is_loaded_to_the_device(tmp_path: Path, verify: bool) -> None:
    expected = state()
    torch_ckpt.save(expected, tmp_path)
    found = targets_like(expected)
    found["with gaps"] = torch.zeros_like(expected["large"])[:, ::3]
    torch_ckpt.load(found, tmp_path, verify=verify)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32], ids=str)
def test_values_are_converted_before_they_are_sent(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.randn(500, 3000) * 100
    torch_ckpt.save({"weight": values}, tmp_path)
    found = {"weight": torch.zeros(500, 3000, dtype=dtype, device="cuda")}
    torch_ckpt.load(found, tmp_path)
    assert torch.equal(found["weight"].cpu(), values.to(dtype))


def test_a_load_waits_for_what_the_current_stream_does_with_its_targets(tmp_path: Path) -> None:
    values = torch.randn(1000, 1000)
    torch_ckpt.save({"weight": values}, tmp_path)
    target = torch.zeros(1000, 1000, device="cuda")
    spin()
    target.fill_(7)
    torch_ckpt.load({"weight": target}, tmp_path)
    assert torch.equal(target.cpu(), values)


def test_a_load_holds_two_chunks_for_each_thread_and_no_more(tmp_path: Path) -> None:
    values = torch.randn(3000, 3000)
    torch_ckpt.save({"weight": values}, tmp_path)
    target = torch.zeros(3000, 3000, device="cuda")
    torch_ckpt.load({"weight": target}, tmp_path, max_inflight_bytes=2 << 20)
    assert torch.equal(target.cpu(), values)
    before = torch.cuda.max_memory_allocated()
    torch_ckpt.load({"weight": target}, tmp_path)
    assert torch.cuda.max_memory_allocated() == before


def test_a_temporary_is_not_written_before_work_that_still_reads_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.randn(1000, 3000)
    torch_ckpt.save({"weight": values}, tmp_path)
    # Spread on the device, by way of a temporary of 1000 x 3000.
    target = torch.zeros(3000, 1000, device="cuda").t()
    copies: list[torch.Tensor] = []
    record = reader.events_of_now

    def record_and_free(devices: Any) -> Any:
        events = record(devices)
        block = torch.full((1000, 3000), 7.0, device="cuda")
        spin()
        copies.append(block.clone())
        return events

    monkeypatch.setattr(reader, "events_of_now", record_and_free)
    torch_ckpt.load({"weight": target}, tmp_path)
    assert torch.equal(target.cpu(), values)
    assert torch.equal(copies[0].cpu(), torch.full((1000, 3000), 7.0))


# --- kinds of states, streams, graphs, processes -------------------------------------------------

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.complex64,
    torch.float8_e4m3fn,
]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_dtype_is_saved_from_and_loaded_to_the_device(tmp_path: Path, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(11)
    values = torch.randint(0, 2, (300, 64), device="cuda", generator=generator).to(dtype)
    torch_ckpt.async_save({"t": values}, tmp_path).result()
    found = torch.zeros(300, 64, device="cuda").to(dtype)
    torch_ckpt.load({"t": found}, tmp_path)
    assert torch.equal(bytes_of(found), bytes_of(values))


@pytest.mark.parametrize("staging", ["blocking", "overlapped"])
def test_thousands_of_small_tensors_are_saved_and_loaded(tmp_path: Path, staging: str) -> None:
    generator = torch.Generator("cuda").manual_seed(13)
    values = {
        str(i): torch.randn(1 + i % 97, device="cuda", generator=generator) for i in range(5000)
    }
    torch_ckpt.async_save(values, tmp_path, staging=staging).result()
    found = {name: torch.zeros_like(value) for name, value in values.items()}
    torch_ckpt.load(found, tmp_path)
    assert all(torch.equal(found[name], value) for name, value in values.items())


def test_more_bytes_than_the_host_budget_are_saved_in_waves(tmp_path: Path) -> None:
    values = {str(i): torch.full((1 << 22,), float(i), device="cuda") for i in range(16)}
    expected = on_host(values)
    handle = torch_ckpt.async_save(
        values, tmp_path / "c", staging="blocking", max_host_bytes=64 << 20
    )
    for value in values.values():
        value.fill_(-1)
    handle.result()
    assert_holds(tmp_path / "c", expected)


def test_saves_from_two_streams_hold_what_their_streams_wrote(tmp_path: Path) -> None:
    tensors = [torch.zeros(1 << 20, device="cuda") for _ in range(2)]
    torch.cuda.synchronize()
    handles = []
    for number, tensor in enumerate(tensors):
        with torch.cuda.stream(torch.cuda.Stream()):
            spin()
            tensor.fill_(number + 5)
            handles.append(torch_ckpt.async_save({"t": tensor}, tmp_path / str(number)))
    for number, handle in enumerate(handles):
        handle.result()
        assert_holds(tmp_path / str(number), {"t": torch.full((1 << 20,), number + 5.0)})


def test_a_load_on_a_side_stream_is_ordered_with_its_work(tmp_path: Path) -> None:
    values = torch.randn(1 << 20)
    torch_ckpt.save({"t": values}, tmp_path)
    target = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        spin()
        target.fill_(3)
        torch_ckpt.load({"t": target}, tmp_path)
        doubled = target * 2
    torch.cuda.synchronize()
    assert torch.equal(doubled.cpu(), values * 2)


def test_a_save_leaves_the_capture_of_a_graph_on_another_stream_intact(tmp_path: Path) -> None:
    source = torch.full((1 << 20,), 2.0, device="cuda")
    captured = torch.zeros(1 << 10, device="cuda")
    torch.cuda.synchronize()
    handle = torch_ckpt.async_save({"t": source}, tmp_path / "c", staging="overlapped")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured.add_(1)
    handle.result()
    assert_holds(tmp_path / "c", {"t": torch.full((1 << 20,), 2.0)})
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured.cpu(), torch.ones(1 << 10))


def test_a_captured_step_that_a_guard_holds_up_does_not_reach_the_checkpoint(
    tmp_path: Path,
) -> None:
    parameter = torch.nn.Parameter(torch.ones(1 << 20, device="cuda"))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.Adam([parameter], lr=0.5, capturable=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for number in range(3):
        expected = on_host({"p": parameter.detach()})
        handle = torch_ckpt.async_save(
            {"p": parameter}, tmp_path / str(number), staging="overlapped"
        )
        handle.guard(optimizer)
        graph.replay()
        handle.result()
        assert_holds(tmp_path / str(number), expected)


def _round_trip_with_expandable_segments(path: str) -> bool:
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    values = {str(i): torch.full((3 << 18,), float(i), device="cuda") for i in range(40)}
    expected = on_host(values)
    handle = torch_ckpt.async_save(values, path, staging="overlapped")
    values.clear()
    torch.cuda.empty_cache()
    handle.result()
    found = {name: torch.zeros(3 << 18, device="cuda") for name in expected}
    torch_ckpt.load(found, path)
    return all(torch.equal(found[name].cpu(), value) for name, value in expected.items())


def test_tensors_in_expandable_segments_are_saved_and_loaded(tmp_path: Path) -> None:
    assert in_fresh_process(_round_trip_with_expandable_segments, str(tmp_path))


def test_a_forked_child_ends_and_leaves_the_parents_saves_intact(tmp_path: Path) -> None:
    values = {"t": torch.full((1 << 22,), 1.0, device="cuda")}
    torch_ckpt.async_save(values, tmp_path / "0").result()
    child = os.fork()
    if child == 0:
        # The child frees page-locked memory that belongs to the parent's device.
        torch_ckpt.trim_pool(0)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    torch_ckpt.async_save(values, tmp_path / "1").result()
    assert_holds(tmp_path / "1", {"t": torch.full((1 << 22,), 1.0)})


def test_a_reserve_for_the_device_serves_the_first_save(tmp_path: Path) -> None:
    torch_ckpt.reserve_pool(64 << 20, device="cuda")
    values = {"t": torch.full((1 << 22,), 6.0, device="cuda")}
    torch_ckpt.async_save(values, tmp_path / "c").result()
    torch_ckpt.trim_pool(0)
    assert_holds(tmp_path / "c", {"t": torch.full((1 << 22,), 6.0)})


def test_a_write_that_fails_leaves_the_device_usable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    values = {"t": torch.full((1 << 22,), 6.0, device="cuda")}
    with pytest.raises(torch_ckpt.CheckpointError):
        torch_ckpt.async_save(values, tmp_path / "file" / "c").result()
    torch.cuda.synchronize()
    torch_ckpt.async_save(values, tmp_path / "c").result()
    assert_holds(tmp_path / "c", {"t": torch.full((1 << 22,), 6.0)})
