"""What ``convert`` reads: tensors of a file or a checkpoint by name, a few at a time.

A source is opened by its metadata alone. Tensors are read into memory of their own, never mapped: a
mapped file that somebody cuts off ends the process, and its pages count as the process's.
"""

from __future__ import annotations

import os
from typing import Any, TypeGuard

import torch

from torch_ckpt._base.formatting import some_of
from torch_ckpt.checkpoint.locating import format_of, is_step_number
from torch_ckpt.checkpoint.metadata import METADATA_NAME
from torch_ckpt.checkpoint.step_names import STEP_NAME
from torch_ckpt.conversion.safetensors_source import SafetensorsDirectory, SafetensorsFile
from torch_ckpt.conversion.source import Entry, Path, Source, allocate_tensor
from torch_ckpt.conversion.torch_source import TorchSource
from torch_ckpt.errors import CheckpointError
from torch_ckpt.inspection.stored_tensors import QUANTIZED, StoredTensors

# What reading tensors from a checkpoint takes beyond them.
_INFLIGHT_BYTES = 64 << 20


def open_source(path: str, allow_pickle: bool) -> Source:
    """Opens a checkpoint, a file of ``torch.save``, or safetensors, by what is at the path.

    Raises:
        FileNotFoundError: there is nothing.
        CheckpointError: it is none of these.
        Corrupt, Unsafe, OSError: it cannot be read.
    """
    if os.path.isdir(path):
        names = os.listdir(path)
        is_other = not any(name == METADATA_NAME or STEP_NAME.match(name) for name in names)
        if is_other and any(name.endswith(".safetensors") for name in names):
            return SafetensorsDirectory(path, names)
        return DcpSource(path, allow_pickle)
    if is_step_number(path) and not os.path.exists(path):
        return DcpSource(path, allow_pickle)
    kind = format_of(path)
    if kind == "torch":
        return TorchSource(path, allow_pickle)
    if kind == "safetensors":
        return SafetensorsFile(path)
    raise CheckpointError(
        f"{path} is neither a safetensors file nor an archive of torch.save; a file of torch.save "
        "from before torch 1.6 must be loaded and saved again first"
    )


class DcpSource(Source):
    """A checkpoint directory, in any sharding."""

    format = "dcp"

    def __init__(self, path: str, allow_pickle: bool) -> None:
        super().__init__()
        self._stored = StoredTensors(path, _INFLIGHT_BYTES, allow_pickle)
        try:
            self._list()
        except BaseException:
            self.close()
            raise

    def _list(self) -> None:
        for name in self._stored.names:
            tensor = self._stored.tensor(name)
            if tensor is None:
                self.objects.append(name)
                continue
            if tensor.dtype in QUANTIZED:
                raise CheckpointError(
                    f"{name}: a quantized tensor ({tensor.dtype}) has no place in other "
                    "formats; dequantize it, or store its integers and scales as tensors"
                )
            self.tensors[name] = Entry(tensor.dtype, tensor.shape)
        paths = self._stored.paths()
        for name in self._stored.names:
            path = paths.get(name)
            # Of another planner this may be anything.
            self.paths[name] = path if _is_path(path) else (name,)

    def read(self, names: list[str]) -> list[torch.Tensor]:
        files: dict[str, int] = {}
        rows = []
        targets = []
        for name in names:
            entry = self.tensors[name]
            target = allocate_tensor(entry)
            whole = (0,) * len(entry.shape), entry.shape
            rows += self._stored.rows(name, whole, target, files)
            targets.append(target)
        if not rows:
            return targets
        try:
            self._stored.reader.read_rows(list(files), rows)
        except ValueError as error:
            # A record that only torch.load knows, and that has more bytes than the limit.
            raise CheckpointError(f"{some_of(names)}: cannot be read in parts: {error}") from error
        return targets

    def object(self, name: str) -> Any:
        return self._stored.read_object(name)

    def close(self) -> None:
        self._stored.reader.release()


def _is_path(path: Any) -> TypeGuard[Path]:
    return type(path) is tuple and bool(path) and all(type(part) in (str, int) for part in path)
