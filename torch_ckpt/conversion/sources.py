"""Opens sources for ``convert``, which read tensors by name, a few at a time.

Opening a source reads only its metadata. Files are read, not mapped: mapped pages would count
towards the memory of this process, which would be killed if another process truncated the file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeGuard

import torch

from torch_ckpt._base.formatting import some_of
from torch_ckpt._base.system import is_url
from torch_ckpt.checkpoint.locating import TORCH_SUFFIXES, format_of, is_step_number
from torch_ckpt.checkpoint.opened import Checkpoint
from torch_ckpt.conversion.input import Entry, Input, Path, allocate_tensor
from torch_ckpt.conversion.torch_source import TorchInput
from torch_ckpt.errors import CheckpointError
from torch_ckpt.inspection.elements import QUANTIZED
from torch_ckpt.options import ReadOptions

# Memory limit of a checkpoint reader, not counting the tensors.
_INFLIGHT_BYTES = 64 << 20


def open_source(
    path: str, allow_pickle: bool, storage_options: Mapping[str, Any] | None = None
) -> Input:
    """Detects the format of a checkpoint, ``torch.save`` file or safetensors, and opens it.

    The suffix of a URL must show that it is a file.

    Raises:
        FileNotFoundError: the path does not exist.
        CheckpointError: the format is unknown.
        Corrupt, Unsafe, OSError: the source cannot be read.
    """
    if is_url(path):
        is_folder = not path.lower().endswith(TORCH_SUFFIXES)
    else:
        is_folder = os.path.isdir(path) or (is_step_number(path) and not os.path.exists(path))
    kind = "safetensors" if is_folder else format_of(path, storage_options)
    if kind == "torch":
        return TorchInput(path, allow_pickle, storage_options)
    if kind == "safetensors":
        return CheckpointInput(path, allow_pickle, storage_options)
    raise CheckpointError(
        f"{path} is neither a safetensors file nor a zip archive written by torch.save. If it was "
        "written by torch older than 1.6, load it and save it again first"
    )


class CheckpointInput(Input):
    """A checkpoint directory, with any sharding, or safetensors files."""

    def __init__(
        self, path: str, allow_pickle: bool, storage_options: Mapping[str, Any] | None
    ) -> None:
        super().__init__()
        options = ReadOptions(
            max_inflight_bytes=_INFLIGHT_BYTES,
            allow_pickle=allow_pickle,
            storage_options=storage_options,
        )
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._stored = Checkpoint(path, options=options).open()
        metadata = self._stored.safetensors_metadata
        self.format = "dcp" if metadata is None else "safetensors"
        self.metadata = metadata or {}
        try:
            self._list()
        except BaseException:
            self.close()
            raise

    def _list(self) -> None:
        paths = self._stored.paths()
        for name in self._stored.names:
            path = paths.get(name)
            # Other planners may have stored anything here.
            self.paths[name] = path if _is_path(path) else (name,)
            tensor = self._stored.tensor(name)
            if tensor is None:
                self.objects.append(name)
                continue
            if tensor.dtype in QUANTIZED:
                raise CheckpointError(
                    f"{name}: quantized tensors ({tensor.dtype}) cannot be converted. Dequantize "
                    "the tensor, or store its integers and scales as tensors"
                )
            self.tensors[name] = Entry(tensor.dtype, tensor.shape)
            self._shapes[name] = tensor.shape

    def _read(self, names: list[str]) -> list[torch.Tensor]:
        shapes = [self._shapes[name] for name in names]
        boxes = [(n, ((0,) * len(shape), shape)) for n, shape in zip(names, shapes, strict=True)]
        try:
            return self._stored.read_boxes(boxes, allocate_tensor)
        except ValueError as error:
            # The record can be read only by torch.load, and is larger than the limit.
            raise CheckpointError(f"{some_of(names)}: cannot be read in parts: {error}") from error

    def _read_object(self, name: str) -> Any:
        return self._stored.read_object(name)

    def close(self) -> None:
        self._stored.close()


def _is_path(path: Any) -> TypeGuard[Path]:
    return type(path) is tuple and bool(path) and all(type(part) in (str, int) for part in path)
