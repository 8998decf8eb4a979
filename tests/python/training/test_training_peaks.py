"""Peak rates, by the names that torch gives to devices."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch

from torch_ckpt.training import flops_per_device
from torch_ckpt.training.peaks import _RATES


@dataclass
class Properties:
    name: str
    multi_processor_count: int = 100


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Properties:
    """Replaces the properties of the only device."""
    properties = Properties("")
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    return properties


@pytest.mark.parametrize(
    ("name", "units", "tflops"),
    [
        ("NVIDIA A100-SXM4-40GB", 108, 312),
        ("NVIDIA A100-SXM4-80GB", 108, 312),
        ("NVIDIA A100-PCIE-40GB", 108, 312),
        ("NVIDIA A100 80GB PCIe", 108, 312),
        ("A100-SXM4-40GB", 108, 312),
        ("NVIDIA H100 80GB HBM3", 132, 989.5),
        ("NVIDIA H100 PCIe", 114, 756.5),
        ("NVIDIA H100 NVL", 132, 835.5),
        ("NVIDIA H200", 132, 989.5),
        ("NVIDIA H200 NVL", 132, 835.5),
        ("NVIDIA GH200 480GB", 132, 989.5),
        ("NVIDIA B200", 148, 2250),
        ("NVIDIA GB200", 152, 2500),
        ("NVIDIA L40S", 142, 362.05),
        ("NVIDIA L40", 142, 181.05),
        ("NVIDIA L4", 58, 121),
        ("NVIDIA A10", 72, 125),
        ("NVIDIA GeForce RTX 4090", 128, 165.2),
        ("NVIDIA GeForce RTX 3090", 82, 71),
        ("NVIDIA GeForce RTX 5090", 170, 209.5),
        ("AMD Instinct MI210", 104, 181),
        ("AMD Instinct MI250X", 110, 191.5),
        ("AMD Instinct MI250X / MI250", 110, 191.5),
        ("AMD Instinct MI250X/MI250", 104, 181.05),
        ("AMD Instinct MI250", 104, 181.05),
        ("AMD Instinct MI300A", 228, 980.6),
        ("AMD Instinct MI300X", 304, 1307.4),
        ("AMD Instinct MI300X VF", 304, 1307.4),
        ("AMD Instinct MI325X", 304, 1307.4),
        ("AMD Instinct MI350X", 256, 2306.9),
        ("AMD Instinct MI355X", 256, 2516.6),
    ],
)
def test_the_peak_depends_on_the_name_of_the_device(
    machine: Properties, name: str, units: int, tflops: float
) -> None:
    machine.name, machine.multi_processor_count = name, units
    assert flops_per_device("cuda:0") == tflops * 1e12


@pytest.mark.parametrize(
    ("dtype", "tflops"),
    [
        (torch.float64, 67),
        (torch.float32, 67),
        ("tf32", 494.5),
        (torch.bfloat16, 989.5),
        (torch.float16, 989.5),
        (torch.float8_e4m3fn, 1979),
        (torch.float8_e5m2, 1979),
        (torch.int8, 1979),
    ],
    ids=str,
)
def test_the_peak_depends_on_the_dtype(
    machine: Properties, dtype: torch.dtype, tflops: float
) -> None:
    machine.name = "NVIDIA H200"
    assert flops_per_device(0, dtype) == tflops * 1e12


V100 = "Tesla V100-SXM2-16GB"
UNKNOWN = [
    *("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "NVIDIA A10G"),
    *("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"),
    *("NVIDIA H100", "NVIDIA H20", "AMD Radeon RX 7900 XTX"),
]


@pytest.mark.parametrize(
    ("name", "units", "dtype", "text"),
    [
        *(
            (name, 100, torch.bfloat16, f"the peak rate of {name} is not known. Use")
            for name in UNKNOWN
        ),
        (
            *("AMD Instinct MI300X", 38, torch.bfloat16),
            "partition of an AMD Instinct MI300X, with 38 of 304",
        ),
        *(
            (V100, 100, dtype, f"{V100} has no known peak rate for {dtype}")
            for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.complex64)
        ),
    ],
)
def test_an_unknown_device_or_dtype_has_no_peak_and_causes_a_warning(
    machine: Properties, name: str, units: int, dtype: torch.dtype, text: str
) -> None:
    machine.name, machine.multi_processor_count = name, units
    with pytest.warns(UserWarning, match=re.escape(text)):
        assert flops_per_device("cuda:0", dtype) is None


def test_the_cpu_has_no_peak_and_the_warning_points_at_the_caller() -> None:
    with pytest.warns(UserWarning, match="the peak rate of cpu is not known") as warnings:
        assert flops_per_device("cpu") is None
    assert warnings[0].filename == __file__


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_a_missing_accelerator_has_no_peak_and_causes_a_warning() -> None:
    with pytest.warns(UserWarning, match="there is no accelerator"):
        assert flops_per_device() is None


@pytest.mark.parametrize("rates", [rates for _, _, rates in _RATES])
def test_narrower_dtypes_are_not_slower(rates: tuple[float | None, ...]) -> None:
    # The last rate is for int8.
    known = [rate for rate in rates[:-1] if rate is not None]
    assert known == sorted(known)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_current_device_is_the_default() -> None:
    assert flops_per_device() == flops_per_device(torch.cuda.current_device())
