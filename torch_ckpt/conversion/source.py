"""What every source of a conversion has."""

from __future__ import annotations

import math
import mmap
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from torch_ckpt.errors import Corrupt
from torch_ckpt.inspection.stored_tensors import empty_tensor

#: Where a value lies in nested dicts and lists.
Path = tuple[str | int, ...]

# From this size on memory is mapped.
_MAPPED_BYTES = 1 << 20


@dataclass(frozen=True)
class Entry:
    """A tensor that a source has.

    Attributes:
        dtype, shape: of the tensor.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Source(ABC):
    """A model in some format. Not thread-safe; ``close()`` lets go of its files.

    Attributes:
        format: "dcp", "torch" or "safetensors".
        tensors: by fully qualified name, in the source's order.
        objects: names of values that are not tensors.
        paths: where each of them lies in nested dicts and lists.
        notes: what the formats that it may be converted to do not keep; clauses for people.
        metadata: texts that belong to the whole, of a safetensors file.
    """

    format: str

    def __init__(self) -> None:
        self.tensors: dict[str, Entry] = {}
        self.objects: list[str] = []
        self.paths: dict[str, Path] = {}
        self.notes: list[str] = []
        self.metadata: dict[str, str] = {}

    @abstractmethod
    def read(self, names: list[str]) -> list[torch.Tensor]:
        """Contiguous CPU tensors that each have a storage of their own.

        Raises:
            Corrupt: what is stored is damaged or cut off.
            OSError: a system call failed.
        """

    def object(self, name: str) -> Any:
        """One that is not a tensor.

        Raises:
            Corrupt, Unsafe, OSError: it cannot be read, or would run code.
        """
        raise KeyError(name)

    @abstractmethod
    def close(self) -> None:
        """Lets go of what is open; further calls do nothing."""


def _memory(count: int) -> bytearray | mmap.mmap:
    """So many bytes, all of which go back to the system with the last that refers to them.

    What malloc keeps of tensors of different sizes for later may be several times what is in use.
    """
    return bytearray(count) if count < _MAPPED_BYTES else mmap.mmap(-1, count)


def allocate_tensor(entry: Entry) -> torch.Tensor:
    """A tensor with a storage of its own."""
    if not entry.nbytes:
        return empty_tensor(entry.shape, entry.dtype)
    flat = torch.frombuffer(_memory(entry.nbytes), dtype=torch.uint8)
    return flat.view(entry.dtype).view(entry.shape)


def read_exactly(stream: BinaryIO, count: int, path: str, name: str) -> bytearray | mmap.mmap:
    """So many bytes.

    Raises:
        Corrupt: the file ends before.
        OSError: it cannot be read.
    """
    data = _memory(count)
    rest = memoryview(data)
    try:
        while rest:
            done = stream.readinto(rest)  # type: ignore[attr-defined]
            if not done:
                raise Corrupt(f"{name}: {path} ends {len(rest)} bytes too early")
            rest = rest[done:]
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    return data


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
