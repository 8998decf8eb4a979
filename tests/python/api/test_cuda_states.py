"""States and conditions that need a real CUDA device; skipped without one.

The engine's order of copies is tested with a simulated device (tests/cpp/fake_device.h).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import torch_ckpt
from tests.forked import in_fork
from torch_ckpt import _C, _core
from torch_ckpt.saving.host_memory import trim_pool

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and _C.has_cuda),
    reason="no CUDA device, or the extension was built without CUDA",
)

REPOSITORY = Path(__file__).resolve().parents[3]
DEVICE = "cuda"
# Some milliseconds of a device.
_SPIN_CYCLES = 50_000_000


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor's bytes on the host, for any dtype and strides."""
    return tensor.detach().resolve_conj().cpu().contiguous().reshape(-1).view(torch.uint8)


def blank_like(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(value) for name, value in state.items()}


def assert_holds(path: Path, expected: dict[str, torch.Tensor]) -> None:
    """Checks that a load to the device gets the same bits."""
    found = blank_like(expected)
    torch_ckpt.load(found, path)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(bits(found[name]), bits(value)), name


def random_bytes(dtype: torch.dtype, count: int = 10_007) -> torch.Tensor:
    """Makes every bit pattern of the dtype, including NaNs."""
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), device=DEVICE).bool()
    size = torch.empty(0, dtype=dtype).element_size()
    data = torch.randint(0, 256, (count * size,), dtype=torch.uint8, device=DEVICE)
    return data.view(dtype)


def spin() -> None:
    """Keeps the current stream busy."""
    torch.cuda._sleep(_SPIN_CYCLES)


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.float8_e5m2, torch.complex64, torch.bool, torch.uint8, torch.int8),
    *(torch.int16, torch.int64),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("staging", ["blocking", "overlapped"])
def test_every_dtype_is_kept_bit_for_bit(tmp_path: Path, dtype: torch.dtype, staging: str) -> None:
    torch.manual_seed(3)
    state = {"a": random_bytes(dtype), "b": random_bytes(dtype, 1), "c": random_bytes(dtype, 0)}
    torch_ckpt.async_save(state, tmp_path / "c", staging=staging).result()
    assert_holds(tmp_path / "c", state)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda t: t[3:50],
    "columns": lambda t: t[:, 5:17],
    "every third": lambda t: t[:, ::3],
    "transposed": lambda t: t.t(),
    "permuted": lambda t: t.view(60, 25, 8).permute(2, 0, 1),
    "expanded": lambda t: t[:1].expand(7, -1),
    "scalar": lambda t: t[3, 4],
    "no rows": lambda t: t[:0],
    "conjugated": lambda t: torch.complex(t, t + 1).conj(),
    "imaginary part": lambda t: torch.complex(t, t + 1).conj().imag,
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("staging", ["blocking", "overlapped"])
def test_a_view_is_saved_as_its_values(tmp_path: Path, name: str, staging: str) -> None:
    full = torch.arange(12_000, dtype=torch.float32, device=DEVICE).reshape(60, 200)
    view = VIEWS[name](full)
    expected = view.cpu().clone()
    torch_ckpt.async_save({"view": view}, tmp_path / "c", staging=staging).result()
    found = torch.zeros(expected.shape, dtype=expected.dtype, device=DEVICE)
    torch_ckpt.load({"view": found}, tmp_path / "c")
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("name", ["rows", "columns", "every third", "transposed", "permuted"])
def test_a_load_into_a_view_changes_no_other_elements(tmp_path: Path, name: str) -> None:
    full = torch.full((60, 200), -1.0, device=DEVICE)
    view = VIEWS[name](full)
    values = torch.arange(view.numel(), dtype=torch.float32).reshape(view.shape)
    torch_ckpt.save({"view": values}, tmp_path)
    torch_ckpt.load({"view": view}, tmp_path)
    expected = torch.full((60, 200), -1.0)
    VIEWS[name](expected).copy_(values)
    assert torch.equal(full.cpu(), expected)


def test_thousands_of_small_tensors_are_kept(tmp_path: Path) -> None:
    values = torch.randn(5000, 33, device=DEVICE)
    state = {f"t{number}": values[number, : number % 33].clone() for number in range(5000)}
    torch_ckpt.async_save(state, tmp_path / "c", staging="overlapped").result()
    assert_holds(tmp_path / "c", state)


def test_values_from_several_streams_are_saved(tmp_path: Path) -> None:
    streams = [torch.cuda.Stream() for _ in range(4)]
    state = {str(number): torch.zeros(1 << 20, device=DEVICE) for number in range(4)}
    torch.cuda.synchronize()
    for number, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            spin()
            state[str(number)].fill_(number + 1)
        torch.cuda.current_stream().wait_stream(stream)
    torch_ckpt.async_save(state, tmp_path / "c", staging="overlapped").result()
    expected = {str(n): torch.full((1 << 20,), n + 1.0, device=DEVICE) for n in range(4)}
    assert_holds(tmp_path / "c", expected)


def test_loaded_values_are_visible_to_every_stream(tmp_path: Path) -> None:
    values = torch.randn(1 << 20)
    torch_ckpt.save({"t": values}, tmp_path)
    target = torch.zeros(1 << 20, device=DEVICE)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch_ckpt.load({"t": target}, tmp_path)
    with torch.cuda.stream(torch.cuda.Stream()):
        copied = target.clone()
    torch.cuda.synchronize()
    assert torch.equal(copied.cpu(), values)


# --- errors --------------------------------------------------------------------------------------


def test_a_failed_save_leaves_the_device_usable(tmp_path: Path) -> None:
    state = {"t": torch.randn(1 << 20, device=DEVICE)}
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(torch_ckpt.CheckpointError):
        torch_ckpt.async_save(state, tmp_path / "file" / "c").result()
    torch_ckpt.async_save(state, tmp_path / "c").result()
    assert_holds(tmp_path / "c", state)


def test_a_damaged_checkpoint_is_refused_by_a_load_to_the_device(tmp_path: Path) -> None:
    state = {"t": torch.randn(1 << 20, device=DEVICE)}
    torch_ckpt.save(state, tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(torch_ckpt.CheckpointError):
        torch_ckpt.load(blank_like(state), tmp_path)
    torch.cuda.synchronize()


# --- forks ---------------------------------------------------------------------------------------


def test_a_forked_child_neither_uses_nor_frees_page_locked_memory(tmp_path: Path) -> None:
    state = {"t": torch.randn(1 << 22, device=DEVICE)}
    torch_ckpt.async_save(state, tmp_path / "before").result()

    def save_on_the_host() -> None:
        torch_ckpt.save({"t": torch.ones(1 << 20)}, tmp_path / "child")
        _core.trim_pool()

    in_fork(save_on_the_host)
    torch_ckpt.async_save(state, tmp_path / "after").result()
    for name in ("before", "after"):
        assert_holds(tmp_path / name, state)
    torch.cuda.synchronize()


# --- CUDA graphs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["save", "async_save", "load"])
def test_a_call_during_a_capture_is_refused_and_the_capture_continues(
    tmp_path: Path, call: str
) -> None:
    tensor = torch.full((1 << 20,), 3.0, device=DEVICE)
    torch_ckpt.save({"t": tensor}, tmp_path / "before")
    path = tmp_path / ("before" if call == "load" else "captured")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.add_(1)
        with pytest.raises((RuntimeError, CheckpointException), match="captures a CUDA graph"):
            getattr(torch_ckpt, call)({"t": tensor}, path)
    graph.replay()
    assert torch.all(tensor == 4)
    assert not (tmp_path / "captured" / ".metadata").exists()


def test_a_running_save_does_not_end_a_capture(tmp_path: Path) -> None:
    saved = torch.full((1 << 24,), 3.0, device=DEVICE)
    captured = torch.zeros(1 << 20, device=DEVICE)
    torch.cuda.synchronize()
    spin()
    handle = torch_ckpt.async_save({"t": saved}, tmp_path / "c", staging="overlapped")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.add_(1)
    graph.replay()
    handle.result()
    torch.cuda.synchronize()
    assert torch.all(captured == 1)
    assert_holds(tmp_path / "c", {"t": torch.full_like(saved, 3.0)})


def test_a_guarded_replayed_step_does_not_reach_the_checkpoint(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(1 << 22, device=DEVICE))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, capturable=True)

    def step() -> None:
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for number in range(3):
        expected = parameter.detach().clone()
        spin()
        path = tmp_path / str(number)
        handle = torch_ckpt.async_save({"p": parameter}, path, staging="overlapped")
        handle.guard(optimizer)
        graph.replay()
        handle.result()
        assert_holds(path, {"p": expected})


# --- allocators and drivers ----------------------------------------------------------------------

ENVIRONMENTS = {
    "expandable segments": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    "cudaMallocAsync": {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
    "no caching": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    "no batches": {"TORCH_CKPT_CUDA_BATCHES": "0"},
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_state_makes_the_round_trip_in_a_fresh_process(name: str) -> None:
    command = [sys.executable, "-m", "benchmarks.run", "gpu", "--round-trip"]
    environment = os.environ | ENVIRONMENTS[name]
    ended = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


# --- host memory ---------------------------------------------------------------------------------


def test_the_first_save_fits_into_reserved_memory(tmp_path: Path) -> None:
    trim_pool()
    state = {"t": torch.randn(1 << 22, device=DEVICE)}
    torch_ckpt.reserve_pool(64 << 20, device=DEVICE)
    before = _core.pool_bytes()
    torch_ckpt.async_save(state, tmp_path / "c", staging="overlapped").result()
    assert _core.pool_bytes() <= before
    assert_holds(tmp_path / "c", state)
