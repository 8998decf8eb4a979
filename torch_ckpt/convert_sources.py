"""What ``convert`` reads: tensors of a file or a checkpoint by name, a few at a time.

A source is opened by its metadata alone. Tensors are read into memory of their own, never mapped: a
mapped file that somebody cuts off ends the process, and its pages count as the process's.
"""

from __future__ import annotations

import errno
import io
import json
import math
import mmap
import os
import pickle
import struct
import zipfile
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeGuard

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.utils import _pytree as pytree

from torch_ckpt import _C
from torch_ckpt.beneath import lies_beneath, outside
from torch_ckpt.directory import OpenDirectory
from torch_ckpt.errors import CheckpointError, Corrupt, Unsafe
from torch_ckpt.metadata import METADATA_NAME
from torch_ckpt.safetensors_format import Place, read_header
from torch_ckpt.stored import QUANTIZED, StoredTensors, empty
from torch_ckpt.text import some_of

#: Where a value lies in nested dicts and lists.
Path = tuple[str | int, ...]

# Its files are read in pieces of this size where they are only checked.
_PIECE_BYTES = 1 << 20

# What reading tensors from a checkpoint takes beyond them.
_INFLIGHT_BYTES = 64 << 20

# From this size on memory is mapped.
_MAPPED_BYTES = 1 << 20

# JSON with names and files.
_MOST_INDEX_BYTES = 1 << 30


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
        objects: names of what is no tensor.
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
        """One that is no tensor.

        Raises:
            Corrupt, Unsafe, OSError: it cannot be read, or would run code.
        """
        raise KeyError(name)

    @abstractmethod
    def close(self) -> None:
        """Lets go of what is open; further calls do nothing."""


def open_source(path: str, allow_pickle: bool) -> Source:
    """Opens a checkpoint directory, a file of ``torch.save``, or safetensors, by what is there.

    Raises:
        FileNotFoundError: there is nothing.
        CheckpointError: it is none of these.
        Corrupt, Unsafe, OSError: it cannot be read.
    """
    if os.path.isdir(path):
        names = os.listdir(path)
        if any(name.endswith(".safetensors") for name in names) and METADATA_NAME not in names:
            return SafetensorsDirectory(path, names)
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


def format_of(path: str) -> str | None:
    """The format of a file by its first bytes: "torch", "safetensors", or None for others.

    Raises:
        OSError: it cannot be read.
    """
    # Opening a FIFO waits for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as stream:
        begin = stream.read(9) or b""
    if begin.startswith(b"PK\3\4"):
        return "torch"
    return "safetensors" if begin[8:] == b"{" else None


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
        metadata = self._stored.metadata
        for name in metadata.state_dict_metadata:
            tensor = self._stored.tensor(name)
            if tensor is None:
                self.objects.append(name)
                continue
            if tensor.properties.dtype in QUANTIZED:
                raise CheckpointError(
                    f"{name}: a quantized tensor ({tensor.properties.dtype}) has no place in other "
                    "formats; dequantize it, or store its integers and scales as tensors"
                )
            self.tensors[name] = Entry(tensor.properties.dtype, tuple(tensor.size))
        paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        for name in metadata.state_dict_metadata:
            path = paths.get(name)
            # Of another planner this may be anything.
            self.paths[name] = path if _is_path(path) else (name,)

    def read(self, names: list[str]) -> list[torch.Tensor]:
        files: dict[str, int] = {}
        rows = []
        targets = []
        for name in names:
            entry = self.tensors[name]
            target = _empty(entry)
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
        return self._stored.object(name)

    def close(self) -> None:
        self._stored.reader.release()


def _is_path(path: Any) -> TypeGuard[Path]:
    return type(path) is tuple and bool(path) and all(type(part) in (str, int) for part in path)


@dataclass(frozen=True)
class _View:
    """Where the elements of a tensor lie in a file.

    Attributes:
        begin: of its storage, in bytes.
        storage_bytes: of that storage.
        offset, stride: in it, in elements.
        is_conj, is_neg: what torch does on reading.
    """

    begin: int
    storage_bytes: int
    offset: int
    stride: tuple[int, ...]
    is_conj: bool
    is_neg: bool


class TorchSource(Source):
    """An archive of ``torch.save``: nested dicts and lists of tensors and other values."""

    format = "torch"

    def __init__(self, path: str, allow_pickle: bool) -> None:
        super().__init__()
        self._path = path
        self._views: dict[str, _View] = {}
        self._objects: dict[str, Any] = {}
        self._sound: set[int] = set()
        # Its entries by where their data begins.
        self._records: dict[int, zipfile.ZipInfo] = {}
        self._stream: BinaryIO = open(path, "rb")  # noqa: SIM115  closed by close()
        try:
            self._find_records()
            self._list(self._loaded(allow_pickle))
        except BaseException:
            self.close()
            raise

    def _find_records(self) -> None:
        try:
            with zipfile.ZipFile(self._stream) as archive:
                self._look_at(archive)
        except CheckpointError:
            raise
        except Exception as error:
            # A damaged place may lie before the file's begin.
            if isinstance(error, OSError) and error.errno != errno.EINVAL:
                raise
            # zipfile has no one class for what it does not understand.
            reason = _first_line(error)
            raise Corrupt(f"{self._path} is a damaged archive: {reason}") from error

    def _look_at(self, archive: zipfile.ZipFile) -> None:
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED:
                raise Corrupt(f"{self._path}: {info.filename} is compressed; torch.save does not")
            if info.CRC and "/data/" not in info.filename:
                # Which compares it with its checksum; torch.load does not.
                data = archive.read(info)
                if info.filename.endswith("/byteorder") and data != b"little":
                    raise CheckpointError(f"{self._path} was written on a big-endian machine")
            self._stream.seek(info.header_offset)
            header = self._stream.read(30)
            if len(header) < 30:
                raise Corrupt(f"{self._path} is a damaged archive: {info.filename} is not there")
            # Its own lengths of name and extra field, which may differ from the directory's.
            name, extra = struct.unpack_from("<HH", header, 26)
            self._records[info.header_offset + 30 + name + extra] = info

    def _loaded(self, allow_pickle: bool) -> Mapping[Any, Any]:
        """What was saved, with tensors without data that know where it is in the file."""
        try:
            loaded = torch.load(self._path, map_location="meta", weights_only=not allow_pickle)
        except pickle.UnpicklingError as error:
            if allow_pickle:
                raise Corrupt(f"{self._path}: {_first_line(error)}") from error
            raise Unsafe(
                f"{self._path} holds more than tensors and plain values, or is damaged; "
                "pass allow_pickle=True (--allow-pickle) only if you trust its writer, or declare "
                "types of your own by torch.serialization.add_safe_globals([...])"
            ) from error
        except OSError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{self._path} cannot be read tensor by tensor ({_first_line(error)}); quantized, "
                "sparse and nested tensors, and subclasses of Tensor, are not converted"
            ) from error
        if not isinstance(loaded, Mapping):
            raise CheckpointError(
                f"{self._path} holds a {type(loaded).__name__}, not a dict of tensors and other "
                "values"
            )
        return loaded

    def _list(self, loaded: Mapping[Any, Any]) -> None:
        self._note_what_is_lost(loaded)
        try:
            flat, self.paths = flatten_state_dict(dict(loaded))
        except ValueError as error:
            raise CheckpointError(f"{self._path}: two values have one name: {error}") from error
        sharing: dict[int, list[str]] = defaultdict(list)
        for name, value in flat.items():
            if not isinstance(value, torch.Tensor):
                self.objects.append(name)
                self._objects[name] = value
                continue
            view = self._view(name, value)
            self._views[name] = view
            self.tensors[name] = Entry(value.dtype, tuple(value.shape))
            if value.numel():
                sharing[view.begin].append(name)
        for names in sharing.values():
            if len(names) > 1:
                self.notes.append(f"share memory in the source, and no more: {some_of(names)}")

    def _note_what_is_lost(self, loaded: Mapping[Any, Any]) -> None:
        empty_ones: list[str] = []
        keys: list[str] = []

        def walk(value: Any, path: str) -> None:
            if isinstance(value, Mapping):
                if not value and path:
                    empty_ones.append(path)
                for key, inner in value.items():
                    below = f"{path}.{key}" if path else str(key)
                    if not isinstance(key, str):
                        keys.append(below)
                    walk(inner, below)
            elif isinstance(value, list):
                for index, inner in enumerate(value):
                    if isinstance(inner, (Mapping, list)):
                        walk(inner, f"{path}.{index}")

        walk(loaded, "")
        if empty_ones:
            self.notes.append(f"empty dicts, which have no name: {some_of(empty_ones)}")
        if keys:
            self.notes.append(f"keys that are no texts become texts: {some_of(keys)}")

    def _view(self, name: str, value: torch.Tensor) -> _View:
        plain = type(value) in (torch.Tensor, torch.nn.Parameter)
        if not plain or value.layout != torch.strided or value.dtype in QUANTIZED:
            raise CheckpointError(
                f"{name}: {self._path} has it as a {type(value).__name__} ({value.layout}, "
                f"{value.dtype}); only plain tensors are converted"
            )
        storage = value.untyped_storage()
        begin = getattr(storage, "_checkpoint_offset", None)
        if begin is None:
            raise CheckpointError(f"{name}: {self._path} has it as a meta tensor, without data")
        record = self._records.get(begin)
        if record is None or record.file_size != storage.nbytes():
            raise Corrupt(f"{name}: {self._path} has no record of the size of its storage")
        strides, offset = value.stride(), int(value.storage_offset())
        return _View(
            begin, storage.nbytes(), offset, strides, bool(value.is_conj()), bool(value.is_neg())
        )

    def read(self, names: list[str]) -> list[torch.Tensor]:
        return [self._read(name, self.tensors[name], self._views[name]) for name in names]

    def _read(self, name: str, entry: Entry, view: _View) -> torch.Tensor:
        if 0 in entry.shape:
            return _empty(entry)
        width = entry.dtype.itemsize
        # From its first element to its last one.
        pairs = zip(entry.shape, view.stride, strict=True)
        span = 1 + sum((size - 1) * stride for size, stride in pairs)
        if view.offset * width > view.storage_bytes - span * width:
            raise Corrupt(f"{name}: {self._path} has it partly outside of its storage")
        is_whole = span * width == view.storage_bytes
        if not is_whole:
            self._require_sound(name, view.begin)
        self._stream.seek(view.begin + view.offset * width)
        data = read_exactly(self._stream, span * width, self._path, name)
        checksum = self._records[view.begin].CRC
        # Zero: it was saved without.
        if is_whole and checksum and _C.crc32(data) != checksum:
            raise Corrupt(f"{name}: {self._path} has other bytes for it than its checksum says")
        as_bytes = torch.frombuffer(data, dtype=torch.uint8)
        # Not every dtype can be copied.
        movable = as_bytes.view(_SAME_WIDTH[width]).as_strided(entry.shape, view.stride)
        tensor = movable.contiguous().view(entry.dtype)
        if view.is_conj:
            tensor = tensor.conj().resolve_conj()
        return tensor.neg() if view.is_neg else tensor

    def _require_sound(self, name: str, begin: int) -> None:
        """Compares all of a record with its checksum, once."""
        info = self._records[begin]
        if begin in self._sound or not info.CRC:
            return
        self._stream.seek(begin)
        checksum, left = 0, info.file_size
        while left:
            piece = read_exactly(self._stream, min(left, _PIECE_BYTES), self._path, name)
            checksum = _C.crc32(piece, checksum)
            left -= len(piece)
        if checksum != info.CRC:
            raise Corrupt(f"{name}: {self._path} has other bytes for it than its checksum says")
        self._sound.add(begin)

    def object(self, name: str) -> Any:
        def materialized(value: torch.Tensor) -> torch.Tensor:
            return self._read(name, Entry(value.dtype, tuple(value.shape)), self._view(name, value))

        return pytree.tree_map_only(torch.Tensor, materialized, self._objects[name])

    def close(self) -> None:
        self._stream.close()


# To move elements of a size in bytes whatever they mean.
_SAME_WIDTH = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}


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
            return _empty(self.tensors[name])
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


def _memory(count: int) -> bytearray | mmap.mmap:
    """So many bytes, all of which go back to the system with the last that refers to them.

    What malloc keeps of tensors of different sizes for later may be several times what is in use.
    """
    return bytearray(count) if count < _MAPPED_BYTES else mmap.mmap(-1, count)


def _empty(entry: Entry) -> torch.Tensor:
    """A tensor with a storage of its own."""
    if not entry.nbytes:
        return empty(entry.shape, entry.dtype)
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


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
