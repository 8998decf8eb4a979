"""Peak rates of accelerators, for computing the model FLOPs utilization (MFU).

The figures come from the vendor data sheets named next to them: TFLOP/s at the maximum clock, for
dense matrices with float32 accumulation. If a sheet gives only the rate for sparse matrices ("with
sparsity"), the table has half of it. If a sheet covers several GPUs, the table has one GPU's share.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch

#: A matrix dtype; "tf32" means ``torch.set_float32_matmul_precision("high")``.
Precision = torch.dtype | Literal["tf32"]


@dataclass(frozen=True)
class _Chip:
    """A torch device's rates in TFLOP/s by precision; None for unsupported precisions.

    Attributes:
        name: a regular expression that matches torch's name for the device, without the vendor.
        units: number of multiprocessors; None if the name is sufficient. A partition of an AMD
            device has the same name as the entire device.
    """

    name: str
    _: KW_ONLY
    fp64: float | None = None
    fp32: float | None = None
    tf32: float | None = None
    bf16: float | None = None
    fp16: float | None = None
    fp8: float | None = None
    int8: float | None = None
    units: int | None = None


_KINDS = {
    "float64": "fp64",
    "float32": "fp32",
    "tf32": "tf32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8": "fp8",
    "int8": "int8",
}

_CHIPS = [
    # NVIDIA A100 Tensor Core GPU data sheet, dense rates; the same for SXM and PCIe.
    _Chip(
        r"A100[- ](SXM4-|PCIE-|80GB )(40GB|80GB|PCIe)",
        fp64=19.5,
        fp32=19.5,
        tf32=156,
        bf16=312,
        fp16=312,
        int8=624,
    ),
    # NVIDIA H100 Tensor Core GPU data sheet, H100 SXM: FP64 Tensor Core and FP32 67; with sparsity
    # TF32 989, BF16 and FP16 1,979, FP8 and INT8 3,958. NVIDIA H200 Tensor Core GPU data sheet,
    # H200 SXM, and NVIDIA GH200 Grace Hopper Superchip data sheet: the same.
    _Chip(
        r"H100( SXM5?)?( 80GB)? HBM3|H100 SXM5?|H200|GH200 (480GB|96GB HBM3|144G HBM3e)",
        fp64=67,
        fp32=67,
        tf32=494.5,
        bf16=989.5,
        fp16=989.5,
        fp8=1979,
        int8=1979,
    ),
    # NVIDIA H100 Tensor Core GPU data sheet of 2022, H100 PCIe: FP64 Tensor Core and FP32 51; with
    # sparsity TF32 756, BF16 and FP16 1,513, FP8 and INT8 3,026.
    _Chip(r"H100 PCIe", fp64=51, fp32=51, tf32=378, bf16=756.5, fp16=756.5, fp8=1513, int8=1513),
    # NVIDIA H100 Tensor Core GPU data sheet, H100 NVL: FP64 Tensor Core and FP32 60; with sparsity
    # TF32 835, BF16 and FP16 1,671, FP8 and INT8 3,341. NVIDIA H200 Tensor Core GPU data sheet,
    # H200 NVL: the same.
    _Chip(
        r"H[12]00 NVL",
        fp64=60,
        fp32=60,
        tf32=417.5,
        bf16=835.5,
        fp16=835.5,
        fp8=1670.5,
        int8=1670.5,
    ),
    # NVIDIA HGX platform specifications, HGX B200 of eight GPUs: FP64 296, FP32 600; with sparsity
    # TF32 18,000, BF16 and FP16 36,000, FP8 72,000.
    _Chip(r"B200", fp64=37, fp32=75, tf32=1125, bf16=2250, fp16=2250, fp8=4500),
    # NVIDIA GB200 NVL72 specifications, 72 GPUs: FP64 2,880, FP32 5,760; with sparsity TF32
    # 180,000, BF16 and FP16 360,000, FP8 720,000.
    _Chip(r"GB200", fp64=40, fp32=80, tf32=1250, bf16=2500, fp16=2500, fp8=5000),
    # NVIDIA L40S data sheet, dense rates.
    _Chip(r"L40S", fp32=91.6, tf32=183, bf16=362.05, fp16=362.05, fp8=733, int8=733),
    # NVIDIA L40 data sheet, dense rates.
    _Chip(r"L40", fp32=90.5, tf32=90.5, bf16=181.05, fp16=181.05, fp8=362, int8=362),
    # NVIDIA L4 data sheet: FP32 30.3; with sparsity TF32 120, BF16 and FP16 242, FP8 and INT8 485.
    _Chip(r"L4", fp32=30.3, tf32=60, bf16=121, fp16=121, fp8=242.5, int8=242.5),
    # NVIDIA A10 data sheet, dense rates. The A10G is a different chip.
    _Chip(r"A10", fp32=31.2, tf32=62.5, bf16=125, fp16=125, int8=250),
    # NVIDIA Ada GPU architecture whitepaper, GeForce RTX 4090, dense rates with accumulation in
    # FP32.
    _Chip(r"GeForce RTX 4090", fp32=82.6, tf32=82.6, bf16=165.2, fp16=165.2, fp8=330.3, int8=660.6),
    # NVIDIA Ampere GA102 GPU architecture whitepaper, GeForce RTX 3090, as for the RTX 4090.
    _Chip(r"GeForce RTX 3090", fp32=35.6, tf32=35.6, bf16=71, fp16=71, int8=284),
    # NVIDIA RTX Blackwell GPU architecture whitepaper, GeForce RTX 5090, as for the RTX 4090.
    _Chip(r"GeForce RTX 5090", fp32=104.8, tf32=104.8, bf16=209.5, fp16=209.5, fp8=419, int8=838),
    # NVIDIA V100 Tensor Core GPU data sheet.
    _Chip(r"V100-SXM2-(16|32)GB", fp64=7.8, fp32=15.7, fp16=125),
    _Chip(r"V100-PCIE-(16|32)GB", fp64=7, fp32=14, fp16=112),
    # NVIDIA T4 data sheet.
    _Chip(r"T4", fp32=8.1, fp16=65, int8=130),
    # AMD Instinct MI250X data sheet, matrix rates: FP64 and FP32 95.7, BF16, FP16 and INT8 383. It
    # has two dies, each of which is a torch device. Both products may report either name.
    _Chip(
        r"MI250X( ?/ ?MI250)?",
        fp64=47.85,
        fp32=47.85,
        bf16=191.5,
        fp16=191.5,
        int8=191.5,
        units=110,
    ),
    # AMD Instinct MI250 data sheet, matrix rates of both dies: FP64 and FP32 90.5, BF16, FP16 and
    # INT8 362.1.
    _Chip(
        r"(MI250X ?/ ?)?MI250",
        fp64=45.25,
        fp32=45.25,
        bf16=181.05,
        fp16=181.05,
        int8=181.05,
        units=104,
    ),
    # AMD Instinct MI210 data sheet, matrix rates.
    _Chip(r"MI210", fp64=45.3, fp32=45.3, bf16=181, fp16=181, int8=181, units=104),
    # AMD Instinct MI300A data sheet, matrix rates.
    _Chip(
        r"MI300A",
        fp64=122.6,
        fp32=122.6,
        tf32=490.3,
        bf16=980.6,
        fp16=980.6,
        fp8=1961.2,
        int8=1961.2,
        units=228,
    ),
    # AMD Instinct MI300X and MI325X data sheets, matrix rates; the same for both.
    _Chip(
        r"(MI300X|MI325X)( OAM| VF)?",
        fp64=163.4,
        fp32=163.4,
        tf32=653.7,
        bf16=1307.4,
        fp16=1307.4,
        fp8=2614.9,
        int8=2614.9,
        units=304,
    ),
    # AMD Instinct MI350X data sheet, matrix rates.
    _Chip(
        r"MI350X( OAM| VF)?",
        fp64=72.1,
        fp32=144.2,
        bf16=2306.9,
        fp16=2306.9,
        fp8=4613.7,
        int8=4613.7,
        units=256,
    ),
    # AMD Instinct MI355X data sheet, matrix rates.
    _Chip(
        r"MI355X( OAM| VF)?",
        fp64=78.6,
        fp32=157.3,
        bf16=2516.6,
        fp16=2516.6,
        fp8=5033.2,
        int8=5033.2,
        units=256,
    ),
]

_VENDOR = re.compile(r"^(NVIDIA|Tesla|AMD|Instinct|\s)+", re.IGNORECASE)


def flops_per_device(
    device: torch.device | str | int | None = None, dtype: Precision = torch.bfloat16
) -> float | None:
    """Returns the vendor's peak rate for dense matrix products on one device.

    The model FLOPs utilization is
    ``flops_per_step / seconds_per_step / (devices * flops_per_device())``.

    Args:
        device: an accelerator; None means the current one.
        dtype: matrix dtype; accumulation is in float32. ``torch.float32`` means full float32
            precision, which is torch's default; "tf32" means
            ``torch.set_float32_matmul_precision("high")``. All float8 dtypes have the same rate.

    Returns:
        The rate in FLOP/s, or in operations per second for integers. None, with a warning, if there
        is no accelerator, if the device or its rate for the dtype is unknown, or if the device is a
        partition of a GPU (such as MIG).

    Raises:
        RuntimeError: torch has no such device.

    Example::

        peak = training.flops_per_device()
        if peak is not None:
            print("MFU", flops_per_step / seconds_per_step / (devices * peak))
    """
    accelerator = _accelerator(device)
    if accelerator is None:
        return _unknown("there is no accelerator")
    if accelerator.type != "cuda":
        return _unknown(f"the peak rate of {accelerator} is not known")
    properties = torch.cuda.get_device_properties(accelerator)
    name, units = properties.name, properties.multi_processor_count
    chips = [chip for chip in _CHIPS if re.fullmatch(chip.name, _VENDOR.sub("", name))]
    if not chips:
        return _unknown(f"the peak rate of {name} is not known")
    chip = next((chip for chip in chips if chip.units in (None, units)), None)
    if chip is None:
        expected = " or ".join(str(chip.units) for chip in chips)
        return _unknown(
            f"{accelerator} is a partition of an {name}, with {units} of {expected} multiprocessors"
        )
    rate = _rate(chip, dtype)
    if rate is None:
        return _unknown(f"{name} has no known peak rate for {dtype}")
    return rate * 1e12


def _accelerator(device: torch.device | str | int | None) -> torch.device | None:
    if device is None:
        return torch.accelerator.current_accelerator(check_available=True)
    if isinstance(device, int):
        return torch.device("cuda", device)
    return torch.device(device)


def _rate(chip: _Chip, dtype: Precision) -> float | None:
    name = str(dtype).removeprefix("torch.")
    kind = _KINDS.get("float8" if name.startswith("float8_") else name)
    return None if kind is None else getattr(chip, kind)


def _unknown(reason: str) -> float | None:
    warnings.warn(
        f"flops_per_device: {reason}. Use your vendor's figure for dense matrices instead",
        stacklevel=3,
    )
    return None
