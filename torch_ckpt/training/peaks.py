"""Peak rates of accelerators, for computing the model FLOPs utilization (MFU).

The table has TFLOP/s at the maximum clock, for dense matrices with float32 accumulation, from the
vendor's data sheet of each product. Exceptions: the rates of B200 and GB200 are from the
specifications of the systems HGX B200 and GB200 NVL72, and the rates of GeForce are from the
whitepapers of GA102, Ada and RTX Blackwell. If a source gives only the rate for sparse matrices,
the table has half of this rate. If a source covers several GPUs, the table has one GPU's share; a
torch device is one of the two dies of an MI250 or MI250X.
"""

from __future__ import annotations

import re
import warnings
from typing import Literal

import torch

#: A matrix dtype; "tf32" means ``torch.set_float32_matmul_precision("high")``.
Precision = torch.dtype | Literal["tf32"]

# A device's rates by dtype, None for unsupported dtypes.
_DTYPES = ("float64", "float32", "tf32", "bfloat16", "float16", "float8", "int8")
_H100 = (67, 67, 494.5, 989.5, 989.5, 1979, 1979)
_MI300X = (163.4, 163.4, 653.7, 1307.4, 1307.4, 2614.9, 2614.9)

# The rates by a regular expression for torch's name of the device, without the vendor. The number
# of multiprocessors is None if the name is sufficient: a partition of an AMD device has the same
# name as the entire device.
_RATES: list[tuple[str, int | None, tuple[float | None, ...]]] = [
    (r"A100[- ](SXM4-|PCIE-|80GB )(40GB|80GB|PCIe)", None, (19.5, 19.5, 156, 312, 312, None, 624)),
    (r"H100( SXM5?)?( 80GB)? HBM3|H100 SXM5?|H200", None, _H100),
    (r"GH200 (480GB|96GB HBM3|144G HBM3e)", None, _H100),
    (r"H100 PCIe", None, (51, 51, 378, 756.5, 756.5, 1513, 1513)),
    (r"H[12]00 NVL", None, (60, 60, 417.5, 835.5, 835.5, 1670.5, 1670.5)),
    (r"B200", None, (37, 75, 1125, 2250, 2250, 4500, None)),
    (r"GB200", None, (40, 80, 1250, 2500, 2500, 5000, None)),
    (r"L40S", None, (None, 91.6, 183, 362.05, 362.05, 733, 733)),
    (r"L40", None, (None, 90.5, 90.5, 181.05, 181.05, 362, 362)),
    (r"L4", None, (None, 30.3, 60, 121, 121, 242.5, 242.5)),
    (r"A10", None, (None, 31.2, 62.5, 125, 125, None, 250)),
    (r"GeForce RTX 4090", None, (None, 82.6, 82.6, 165.2, 165.2, 330.3, 660.6)),
    (r"GeForce RTX 3090", None, (None, 35.6, 35.6, 71, 71, None, 284)),
    (r"GeForce RTX 5090", None, (None, 104.8, 104.8, 209.5, 209.5, 419, 838)),
    (r"V100-SXM2-(16|32)GB", None, (7.8, 15.7, None, None, 125, None, None)),
    (r"V100-PCIE-(16|32)GB", None, (7, 14, None, None, 112, None, None)),
    (r"T4", None, (None, 8.1, None, None, 65, None, 130)),
    # Both products may report either name.
    (r"MI250X( ?/ ?MI250)?", 110, (47.85, 47.85, None, 191.5, 191.5, None, 191.5)),
    (r"(MI250X ?/ ?)?MI250", 104, (45.25, 45.25, None, 181.05, 181.05, None, 181.05)),
    (r"MI210", 104, (45.3, 45.3, None, 181, 181, None, 181)),
    (r"MI300A", 228, (122.6, 122.6, 490.3, 980.6, 980.6, 1961.2, 1961.2)),
    (r"(MI300X|MI325X)( OAM| VF)?", 304, _MI300X),
    (r"MI350X( OAM| VF)?", 256, (72.1, 144.2, None, 2306.9, 2306.9, 4613.7, 4613.7)),
    (r"MI355X( OAM| VF)?", 256, (78.6, 157.3, None, 2516.6, 2516.6, 5033.2, 5033.2)),
]


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
    found = _rate(device, str(dtype))
    if isinstance(found, float):
        return found
    warnings.warn(
        f"flops_per_device: {found}. Use your vendor's figure for dense matrices instead",
        stacklevel=2,
    )
    return None


def _rate(device: torch.device | str | int | None, dtype: str) -> float | str:
    """Returns the rate, or the reason why there is none."""
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True)
        if device is None:
            return "there is no accelerator"
    accelerator = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if accelerator.type != "cuda":
        return f"the peak rate of {accelerator} is not known"
    properties = torch.cuda.get_device_properties(accelerator)
    name, units = properties.name, properties.multi_processor_count
    short_name = re.sub(r"(?i)^(NVIDIA|Tesla|AMD|Instinct|\s)+", "", name)
    sizes = {size: rates for text, size, rates in _RATES if re.fullmatch(text, short_name)}
    if not sizes:
        return f"the peak rate of {name} is not known"
    rates = sizes.get(units, sizes.get(None))
    if rates is None:
        expected = " or ".join(map(str, sizes))
        return (
            f"{accelerator} is a partition of an {name}, with {units} of {expected} multiprocessors"
        )
    kind = re.sub(r"^torch\.|(?<=float8)_.*", "", dtype)
    rate = dict(zip(_DTYPES, rates, strict=True)).get(kind)
    return f"{name} has no known peak rate for {dtype}" if rate is None else rate * 1e12
