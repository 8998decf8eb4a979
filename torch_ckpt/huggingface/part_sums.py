"""Checksums of tensors that Python writes to safetensors files, as the engine sends them to the
coordinator of a save (csrc/format/part_sums.h)."""

from __future__ import annotations

import functools
import struct
from array import array

import torch

from torch_ckpt import _core
from torch_ckpt.checkpoint.tensor_bytes import host_pieces

# Limits of the size of a block, and the number of blocks above which a larger size is chosen, as in
# csrc/format/checksum_table.cpp.
_LEAST_BLOCK, _LARGEST_BLOCK, _BLOCKS = 16 << 10, 1 << 20, 1024


class PartSums:
    """The checksums of complete tensors in one file."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def add(self, begin: int, data: torch.Tensor) -> None:
        """Adds a tensor.

        Args:
            begin: offset of the tensor's data in the file.
            data: the bytes of the tensor.
        """
        count = data.numel()
        if count == 0:  # An empty tensor has no checksums.
            return
        block = _LEAST_BLOCK
        while block < _LARGEST_BLOCK and count > block * _BLOCKS:
            block *= 2
        shares = array("I")
        # Each piece but the last consists of complete blocks.
        for piece in host_pieces(data):
            for at in range(0, len(piece), block):
                part = piece[at : at + block]
                # The share of a rank that has the complete block (csrc/format/partial_crc.h).
                shares.append(_core.crc32(part) ^ _crc_of_zeros(len(part)))
        head = struct.pack("<QQQQI", begin, count, count, 0, len(shares))
        self._parts.append(head + shares.tobytes())

    def encode(self) -> bytes:
        """Returns the encoded checksums of the file."""
        body = struct.pack("<I", len(self._parts)) + b"".join(self._parts)
        return body + struct.pack("<I", _core.crc32(body))


@functools.lru_cache(maxsize=64)
def _crc_of_zeros(count: int) -> int:
    return _core.crc32(bytes(count))
