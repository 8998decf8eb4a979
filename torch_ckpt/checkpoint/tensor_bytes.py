"""Tensors as bytes."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence

import torch

#: Integer dtypes by size in bytes. Some dtypes can be copied and reshaped only as integers.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Size of the pieces in which a tensor on a device is copied to the host.
_PIECE_BYTES = 64 << 20


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor as a one-dimensional tensor: a view if the tensor is
    contiguous, otherwise a copy."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.itemsize in BITS:
        tensor = tensor.view(BITS[tensor.itemsize])
    # Not view() or reshape(): they keep the stride of a dimension of size 1, which may be any
    # number.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def host_pieces(data: torch.Tensor) -> Iterator[memoryview]:
    """Yields the data of a byte tensor in pieces in host memory."""
    for begin in range(0, data.numel(), _PIECE_BYTES):
        host = data[begin : begin + _PIECE_BYTES].cpu()
        array = (ctypes.c_char * host.numel()).from_address(host.data_ptr())
        array.owner = host  # type: ignore[attr-defined]  # keeps the memory
        yield memoryview(array).cast("B")


def empty_tensor(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Allocates a contiguous tensor without initializing it, also of dtypes that torch.empty does
    not support."""
    count = math.prod(shape)
    data = torch.empty(count * dtype.itemsize, dtype=torch.uint8, device=device)
    return data.view(dtype).view(tuple(shape))
