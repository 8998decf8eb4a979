"""Sources for ``convert``: safetensors files and directories of safetensors files."""

from __future__ import annotations

import io
import json
import os
from typing import BinaryIO

import torch

from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.files import lies_beneath, outside
from torch_ckpt.conversion.safetensors_header import TensorRange, read_header
from torch_ckpt.conversion.source import Entry, Source, allocate_tensor, read_exactly
from torch_ckpt.errors import CheckpointError, Corrupt

# Maximum size of an index, which is read into memory.
_MAX_INDEX_BYTES = 1 << 30


class _Safetensors(Source):
    """Reads tensors from one or more safetensors files."""

    format = "safetensors"

    def __init__(self) -> None:
        super().__init__()
        self._ranges: dict[str, tuple[BinaryIO, TensorRange]] = {}
        self._streams: list[BinaryIO] = []

    def _add(self, stream: BinaryIO) -> list[str]:
        """Adds the tensors of a file and returns their names."""
        self._streams.append(stream)
        length = os.fstat(stream.fileno()).st_size
        ranges, metadata = read_header(stream, length, stream.name)
        for name, found in ranges.items():
            if name in self._ranges:
                other = self._ranges[name][0].name
                raise Corrupt(f"both {other} and {stream.name} contain a tensor named {name}")
            self._ranges[name] = stream, found
            self.tensors[name] = Entry(found.dtype, found.shape)
            self.paths[name] = (name,)
        self.metadata.update(metadata)
        return list(ranges)

    def read(self, names: list[str]) -> list[torch.Tensor]:
        return [self._read(name) for name in names]

    def _read(self, name: str) -> torch.Tensor:
        stream, found = self._ranges[name]
        if not found.nbytes:
            return allocate_tensor(found.shape, found.dtype)
        stream.seek(found.begin)
        data = read_exactly(stream, found.nbytes, stream.name, name)
        return torch.frombuffer(data, dtype=torch.uint8).view(found.dtype).view(found.shape)

    def close(self) -> None:
        for stream in self._streams:
            stream.close()


class SafetensorsFile(_Safetensors):
    """A single safetensors file."""

    def __init__(self, path: str) -> None:
        super().__init__()
        try:
            self._add(open(path, "rb"))  # noqa: SIM115  closed by close()
        except BaseException:
            self.close()
            raise


class SafetensorsDirectory(_Safetensors):
    """A directory with an index of safetensors files, or with a single file.

    Raises:
        CheckpointError: the directory contains several files and no index, or several indexes.
        Corrupt: a file is damaged, or the index does not match the files.
    """

    def __init__(self, path: str, names: list[str]) -> None:
        super().__init__()
        self._directory = OpenDirectory(path)
        try:
            self._list(names)
        except BaseException:
            self.close()
            raise

    def _list(self, names: list[str]) -> None:
        path = self._directory.path
        indices = [name for name in names if name.endswith(".safetensors.index.json")]
        files = [name for name in names if name.endswith(".safetensors")]
        if len(indices) == 1:
            with self._open(indices[0]) as stream:
                indexed = _read_weight_map(stream)
        elif indices or len(files) != 1:
            raise CheckpointError(
                f"{path} contains {len(files)} safetensors files and {len(indices)} indexes. Pass "
                "the path of one file, or keep exactly one *.safetensors.index.json"
            )
        else:
            indexed = None
        if indexed is None:
            self._add(self._open(files[0]))
            return
        stored = {
            name: file
            for file in sorted(set(indexed.values()))
            for name in self._add(self._open(file))
        }
        for name in {**indexed, **stored}:
            expected, found = indexed.get(name, "no file"), stored.get(name, "no file")
            if expected != found:
                raise Corrupt(
                    f"{path}: the index assigns {name} to {expected}, but {found} contains it"
                )

    def _open(self, file: str) -> BinaryIO:
        if not lies_beneath(file):
            raise outside(self._directory.path, file)
        return _NamedFile(self._directory, file)

    def close(self) -> None:
        super().close()
        self._directory.close()


class _NamedFile(io.BufferedReader):
    """A file opened inside an open directory; keeps its path for error messages."""

    def __init__(self, directory: OpenDirectory, file: str) -> None:
        super().__init__(io.FileIO(file, opener=directory.open_for_read))
        self._path = os.path.join(directory.path, file)

    @property
    def name(self) -> str:
        return self._path


def _read_weight_map(stream: BinaryIO) -> dict[str, str]:
    text = stream.read(_MAX_INDEX_BYTES + 1)
    try:
        if len(text) > _MAX_INDEX_BYTES:
            raise ValueError(f"it is larger than {_MAX_INDEX_BYTES} bytes")
        index = json.loads(text.decode())
        files = index["weight_map"]
        if not all(isinstance(file, str) for file in files.values()):
            raise ValueError("the values of weight_map are not file names")
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise Corrupt(
            f"{stream.name} is not a valid index of safetensors files: {error}"
        ) from error
    return dict(files)
