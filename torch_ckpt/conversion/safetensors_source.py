"""Safetensors files and directories as sources."""

from __future__ import annotations

import io
import json
import os
from typing import BinaryIO

import torch

from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.files import lies_beneath, outside
from torch_ckpt.conversion.safetensors_header import Place, read_header
from torch_ckpt.conversion.source import Entry, Source, allocate_tensor, read_exactly
from torch_ckpt.errors import CheckpointError, Corrupt

# JSON with names and files.
_MOST_INDEX_BYTES = 1 << 30


class _Safetensors(Source):
    """Tensors in files of that format."""

    format = "safetensors"

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[str, tuple[BinaryIO, Place]] = {}
        self._streams: list[BinaryIO] = []

    def _add(self, stream: BinaryIO) -> list[str]:
        """Adds the tensors of a file; returns their names."""
        self._streams.append(stream)
        length = os.fstat(stream.fileno()).st_size
        places, metadata = read_header(stream, length, stream.name)
        for name, place in places.items():
            if name in self._places:
                other = self._places[name][0].name
                raise Corrupt(f"{name}: both {other} and {stream.name} have it")
            self._places[name] = stream, place
            self.tensors[name] = Entry(place.dtype, place.shape)
            self.paths[name] = (name,)
        self.metadata.update(metadata)
        return list(places)

    def read(self, names: list[str]) -> list[torch.Tensor]:
        return [self._read(name) for name in names]

    def _read(self, name: str) -> torch.Tensor:
        stream, place = self._places[name]
        if not place.nbytes:
            return allocate_tensor(self.tensors[name])
        stream.seek(place.begin)
        data = read_exactly(stream, place.nbytes, stream.name, name)
        return torch.frombuffer(data, dtype=torch.uint8).view(place.dtype).view(place.shape)

    def close(self) -> None:
        for stream in self._streams:
            stream.close()


class SafetensorsFile(_Safetensors):
    """One file."""

    def __init__(self, path: str) -> None:
        super().__init__()
        try:
            self._add(open(path, "rb"))  # noqa: SIM115  closed by close()
        except BaseException:
            self.close()
            raise


class SafetensorsDirectory(_Safetensors):
    """A directory of files with an index, or of one file."""

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
                places = _weight_map(stream)
        elif indices or len(files) != 1:
            raise CheckpointError(
                f"{path} has {len(files)} safetensors files and {len(indices)} indices: name one "
                "file, or leave one *.safetensors.index.json"
            )
        else:
            places = None
        if places is None:
            self._add(self._open(files[0]))
            return
        stored = {
            name: file
            for file in sorted(set(places.values()))
            for name in self._add(self._open(file))
        }
        for name in {**places, **stored}:
            said, found = places.get(name, "no file"), stored.get(name, "no file")
            if said != found:
                raise Corrupt(f"{path}: {name}: the index has it in {said}, and {found} has it")

    def _open(self, file: str) -> BinaryIO:
        if not lies_beneath(file):
            raise outside(self._directory.path, file)
        return _Named(self._directory, file)

    def close(self) -> None:
        super().close()
        self._directory.close()


class _Named(io.BufferedReader):
    """A file beneath a directory that is open, with its path for messages."""

    def __init__(self, directory: OpenDirectory, file: str) -> None:
        super().__init__(io.FileIO(file, opener=directory.open_for_read))
        self._path = os.path.join(directory.path, file)

    @property
    def name(self) -> str:
        return self._path


def _weight_map(stream: BinaryIO) -> dict[str, str]:
    text = stream.read(_MOST_INDEX_BYTES + 1)
    try:
        if len(text) > _MOST_INDEX_BYTES:
            raise ValueError(f"it has more than {_MOST_INDEX_BYTES} bytes")
        index = json.loads(text.decode())
        places = index["weight_map"]
        if not all(isinstance(file, str) for file in places.values()):
            raise ValueError("weight_map does not name files")
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise Corrupt(f"{stream.name} is not an index of safetensors files: {error}") from error
    return dict(places)
