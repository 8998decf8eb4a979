"""Peak rates of accelerators, for computing the model FLOPs utilization (MFU).

The figures come from the vendor data sheets named next to them: TFLOP/s at the maximum clock, for
dense matrices with float32 accumulation. If a sheet gives only the rate for sparse matrices ("with
sparsity"), the table has half of it. If a sheet covers several GPUs, the table has one GPU's share.
"""

from __future__ import annotations

import re
import warnings
from typing import Literal, NamedTuple

import torch

#: A matrix dtype; "tf32" means ``torch.set_float32_matmul_precision("high")``.
Precision = torch.dtype | Literal["tf32"]


class _Chip(NamedTuple):
    """A torch device's rates in TFLOP/s by dtype; None for unsupported dtypes.

    Attributes:
        name: a regular expression that matches torch's name for the device, without the vendor.
        units: number of multiprocessors; None if the name is sufficient. A partition of an AMD
            device has the same name as the entire device.
    """

    name: str
    float64: float | None
    float32: float | None
    tf32: float | None
    bfloat16: float | None
    float16: float | None
    float8: float | None = None
    int8: float | None = None
    units: int | None = None


_CHIPS = [
    # NVIDIA A100 Tensor Core GPU data sheet, dense rates; the same for SXM and PCIe.
    _Chip(r"A100[- ](SXM4-|PCIE-|80GB )(40GB|80GB|PCIe)", 19.5, 19.5, 156, 312, 312, None, 624),
    # NVIDIA H100 Tensor Core GPU data sheet, H100 SXM: FP64 Tensor Core and FP32 67; with sparsity
    # TF32 989, BF16 and FP16 1,979, FP8 and INT8 3,958. NVIDIA H200 Tensor Core GPU data sheet,
    # H200 SXM, and NVIDIA GH200 Grace Hopper Superchip data sheet: the same.
    _Chip(r"H100( SXM5?)?( 80GB)? HBM3|H100 SXM5?|H200", 67, 67, 494.5, 989.5, 989.5, 1979, 1979),
    _Chip(r"GH200 (480GB|96GB HBM3|144G HBM3e)", 67, 67, 494.5, 989.5, 989.5, 1979, 1979),
    # NVIDIA H100 Tensor Core GPU data sheet of 2022, H100 PCIe: FP64 Tensor Core and FP32 51; with
    # sparsity TF32 756, BF16 and FP16 1,513, FP8 and INT8 3,026.
    _Chip(r"H100 PCIe", 51, 51, 378, 756.5, 756.5, 1513, 1513),
    # NVIDIA H100 Tensor Core GPU data sheet, H100 NVL: FP64 Tensor Core and FP32 60; with sparsity
    # TF32 835, BF16 and FP16 1,671, FP8 and INT8 3,341. NVIDIA H200 Tensor Core GPU data sheet,
    # H200 NVL: the same.
    _Chip(r"H[12]00 NVL", 60, 60, 417.5, 835.5, 835.5, 1670.5, 1670.5),
    # NVIDIA HGX platform specifications, HGX B200 of eight GPUs: FP64 296, FP32 600; with sparsity
    # TF32 18,000, BF16 and FP16 36,000, FP8 72,000.
    _Chip(r"B200", 37, 75, 1125, 2250, 2250, 4500),
    # NVIDIA GB200 NVL72 specifications, 72 GPUs: FP64 2,880, FP32 5,760; with sparsity TF32
    # 180,000, BF16 and FP16 360,000, FP8 720,000.
    _Chip(r"GB200", 40, 80, 1250, 2500, 2500, 5000),
    # NVIDIA L40S data sheet, dense rates.
    _Chip(r"L40S", None, 91.6, 183, 362.05, 362.05, 733, 733),
    # NVIDIA L40 data sheet, dense rates.
    _Chip(r"L40", None, 90.5, 90.5, 181.05, 181.05, 362, 362),
    # NVIDIA L4 data sheet: FP32 30.3; with sparsity TF32 120, BF16 and FP16 242, FP8 and INT8 485.
    _Chip(r"L4", None, 30.3, 60, 121, 121, 242.5, 242.5),
    # NVIDIA A10 data sheet, dense rates. The A10G is a different chip.
    _Chip(r"A10", None, 31.2, 62.5, 125, 125, None, 250),
    # NVIDIA Ada GPU architecture whitepaper, GeForce RTX 4090, dense rates with accumulation in
    # FP32.
    _Chip(r"GeForce RTX 4090", None, 82.6, 82.6, 165.2, 165.2, 330.3, 660.6),
    # NVIDIA Ampere GA102 GPU architecture whitepaper, GeForce RTX 3090, as for the RTX 4090.
    _Chip(r"GeForce RTX 3090", None, 35.6, 35.6, 71, 71, None, 284),
    # NVIDIA RTX Blackwell GPU architecture whitepaper, GeForce RTX 5090, as for the RTX 4090.
    _Chip(r"GeForce RTX 5090", None, 104.8, 104.8, 209.5, 209.5, 419, 838),
    # NVIDIA V100 Tensor Core GPU data sheet.
    _Chip(r"V100-SXM2-(16|32)GB", 7.8, 15.7, None, None, 125),
    _Chip(r"V100-PCIE-(16|32)GB", 7, 14, None, None, 112),
    # NVIDIA T4 data sheet.
    _Chip(r"T4", None, 8.1, None, None, 65, None, 130),
    # AMD Instinct MI250X data sheet, matrix rates: FP64 and FP32 95.7, BF16, FP16 and INT8 383. It
    # has two dies, each of which is a torch device. Both products may report either name.
    _Chip(r"MI250X( ?/ ?MI250)?", 47.85, 47.85, None, 191.5, 191.5, None, 191.5, 110),
    # AMD Instinct MI250 data sheet, matrix rates of both dies: FP64 and FP32 90.5, BF16, FP16 and
    # INT8 362.1.
    _Chip(r"(MI250X ?/ ?)?MI250", 45.25, 45.25, None, 181.05, 181.05, None, 181.05, 104),
    # AMD Instinct MI210 data sheet, matrix rates.
    _Chip(r"MI210", 45.3, 45.3, None, 181, 181, None, 181, 104),
    # AMD Instinct MI300A data sheet, matrix rates.
    _Chip(r"MI300A", 122.6, 122.6, 490.3, 980.6, 980.6, 1961.2, 1961.2, 228),
    # AMD Instinct MI300X and MI325X data sheets, matrix rates; the same for both.
    _Chip(r"(MI300X|MI325X)( OAM| VF)?", 163.4, 163.4, 653.7, 1307.4, 1307.4, 2614.9, 2614.9, 304),
    # AMD Instinct MI350X data sheet, matrix rates.
    _Chip(r"MI350X( OAM| VF)?", 72.1, 144.2, None, 2306.9, 2306.9, 4613.7, 4613.7, 256),
    # AMD Instinct MI355X data sheet, matrix rates.
    _Chip(r"MI355X( OAM| VF)?", 78.6, 157.3, None, 2516.6, 2516.6, 5033.2, 5033.2, 256),
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
    kind = re.sub(r"^torch\.|(?<=float8)_.*", "", str(dtype))
    rate: float | None = getattr(chip, kind) if kind in _Chip._fields[1:-1] else None
    if rate is None:
        return _unknown(f"{name} has no known peak rate for {dtype}")
    return rate * 1e12


def _accelerator(device: torch.device | str | int | None) -> torch.device | None:
    if device is None:
        return torch.accelerator.current_accelerator(check_available=True)
    if isinstance(device, int):
        return torch.device("cuda", device)
    return torch.device(device)


def _unknown(reason: str) -> float | None:
    warnings.warn(
        f"flops_per_device: {reason}. Use your vendor's figure for dense matrices instead",
        stacklevel=3,
    )
    return None
