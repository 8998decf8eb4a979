"""Defines the interface of sources for ``convert``."""

from __future__ import annotations

import io
import math
import mmap
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from torch_ckpt.checkpoint.tensor_bytes import empty_tensor
from torch_ckpt.errors import CheckpointError, Corrupt

#: Keys and indexes that lead to a value in nested dicts and lists.
Path = tuple[str | int, ...]

# Buffers of at least this size are allocated with mmap.
_MAPPED_BYTES = 1 << 20


@dataclass(frozen=True)
class Entry:
    """The dtype and shape of a tensor in a source."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Input(ABC):
    """A model in one of the supported formats. Not thread-safe; ``close()`` closes the files.

    All names, and the dtypes of ``tensors``, are those that the values get in the target;
    convert.py sets them.

    Attributes:
        format: "dcp", "torch" or "safetensors".
        tensors: tensors by fully qualified name, in the order of the source.
        objects: names of values that are not tensors.
        paths: the path of each tensor and object in nested dicts and lists.
        notes: clauses that describe properties lost in a conversion.
        metadata: metadata of a safetensors file; empty for other formats.
        stored_names: the name in the source of each value that has a new name.
        dtype: dtype of the floating-point tensors; None if each has the stored dtype.
    """

    format: str

    def __init__(self) -> None:
        self.tensors: dict[str, Entry] = {}
        self.objects: list[str] = []
        self.paths: dict[str, Path] = {}
        self.notes: list[str] = []
        self.metadata: dict[str, str] = {}
        self.stored_names: dict[str, str] = {}
        self.dtype: torch.dtype | None = None

    def read(self, names: list[str]) -> list[torch.Tensor]:
        """Reads tensors into contiguous CPU tensors, each with its own storage.

        Raises:
            Corrupt: the stored data is damaged or truncated.
            CheckpointError: a tensor cannot be converted to its dtype.
            OSError: a system call failed.
        """
        stored = [self.stored_names.get(name, name) for name in names]
        if self.dtype is None:
            return self._read(stored)
        # Read one at a time: the caller's memory limit covers only the converted tensors.
        pairs = zip(names, stored, strict=True)
        return [self._convert(name, *self._read([old])) for name, old in pairs]

    def read_object(self, name: str) -> Any:
        """Reads a value that is not a tensor.

        Raises:
            Corrupt, OSError: the value cannot be read.
            Unsafe: the value contains a type that is not allow-listed.
        """
        return self._read_object(self.stored_names.get(name, name))

    @abstractmethod
    def close(self) -> None:
        """Closes the files. Further calls do nothing."""

    @abstractmethod
    def _read(self, names: list[str]) -> list[torch.Tensor]:
        """Reads tensors by their names in the source."""

    @abstractmethod
    def _read_object(self, name: str) -> Any:
        """Reads an object by its name in the source."""

    def _convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Converts a tensor to its dtype. Adds a note if values overflow."""
        dtype, stored = self.tensors[name].dtype, tensor.dtype
        if dtype is stored:
            return tensor
        try:
            converted = tensor.to(dtype)
        except RuntimeError as error:
            raise CheckpointError(
                f"{name}: {stored} cannot be converted to {dtype}: {error}"
            ) from error
        if torch.finfo(dtype).max < torch.finfo(stored).max:
            # torch does not implement isfinite() for 8-bit floats.
            before = tensor.float() if stored.itemsize == 1 else tensor
            if bool((before.isfinite() & ~converted.float().isfinite()).any()):
                self.notes.append(
                    f"{name} has values that overflow {dtype} and became infinite or NaN"
                )
        return converted


def _allocate(count: int) -> bytearray | mmap.mmap:
    """Allocates memory that is returned to the system as soon as it is no longer used.

    Freed tensors of various sizes would fragment malloc's heap, which may then retain several times
    the memory in use.
    """
    return bytearray(count) if count < _MAPPED_BYTES else mmap.mmap(-1, count)


def allocate_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allocates a tensor with its own storage."""
    if 0 in shape:
        return empty_tensor(shape, dtype)
    memory = _allocate(math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def read_exactly(
    stream: io.BufferedIOBase, count: int, path: str, name: str
) -> bytearray | mmap.mmap:
    """Reads ``count`` bytes from a file's current position.

    Args:
        path, name: the file path and the tensor name, for error messages.

    Raises:
        Corrupt: the file ends early.
        OSError: the file cannot be read.
    """
    data = _allocate(count)
    remaining = memoryview(data)
    try:
        while remaining:
            done = stream.readinto(remaining)
            if not done:
                raise Corrupt(
                    f"{name}: {path} is truncated: {len(remaining)} bytes of the tensor are missing"
                )
            remaining = remaining[done:]
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    return data
