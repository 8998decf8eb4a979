"""Opens sources for ``convert``, which read tensors by name, a few at a time.

Opening a source reads only its metadata. Files are read, not mapped: mapped pages would count
towards the memory of this process, which would be killed if another process truncated the file.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import struct
import zipfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.utils import _pytree as pytree

from torch_ckpt import _core
from torch_ckpt._base.formatting import first_line, some_of
from torch_ckpt._base.system import is_url
from torch_ckpt.checkpoint.folders import open_file
from torch_ckpt.checkpoint.locating import TORCH_SUFFIXES, format_of, is_step_number
from torch_ckpt.checkpoint.opened import Checkpoint
from torch_ckpt.checkpoint.tensor_bytes import BITS
from torch_ckpt.conversion.input import (
    Entry,
    Input,
    Path,
    allocate_tensor,
    read_exactly,
)
from torch_ckpt.errors import CheckpointError, Corrupt, Unsafe
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


# --- torch.save files -----------------------------------------------------------------------------


# Size of the pieces in which records are read to compute their checksums.
_PIECE_BYTES = 1 << 20

# Headers of neighboring records often fit in one read.
_BUFFER_BYTES = 64 << 10


@dataclass(frozen=True)
class _View:
    """A tensor, and the location of its elements in a file."""

    entry: Entry
    begin: int  # offset of the tensor's storage in the file, in bytes
    storage_bytes: int
    offset: int  # in the storage, in elements
    stride: tuple[int, ...]  # in elements
    # Whether to conjugate or negate the values when they are read.
    is_conj: bool
    is_neg: bool


class TorchInput(Input):
    """A ``torch.save`` archive: nested dicts and lists of tensors and other values."""

    format = "torch"

    def __init__(
        self, path: str, allow_pickle: bool, storage_options: Mapping[str, Any] | None
    ) -> None:
        super().__init__()
        self._path = path
        self._views: dict[str, _View] = {}
        self._objects: dict[str, Any] = {}
        self._verified: set[int] = set()
        # Archive entries, by the offset of their data.
        self._records: dict[int, zipfile.ZipInfo] = {}
        self._stream = io.BufferedReader(open_file(path, storage_options), _BUFFER_BYTES)
        try:
            self._find_records()
            self._list(self._load_skeleton(allow_pickle))
        except BaseException:
            self.close()
            raise

    def _find_records(self) -> None:
        try:
            with zipfile.ZipFile(self._stream) as archive:
                self._check_entries(archive)
        except CheckpointError:
            raise
        except Exception as error:
            # EINVAL means damage: a damaged offset may be negative.
            if isinstance(error, OSError) and error.errno != errno.EINVAL:
                raise
            # zipfile raises many types of exceptions for damaged archives.
            reason = first_line(error)
            raise Corrupt(f"{self._path} is a damaged archive: {reason}") from error

    def _check_entries(self, archive: zipfile.ZipFile) -> None:
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED:
                raise Corrupt(
                    f"{self._path}: entry {info.filename} is compressed, but torch.save never "
                    "compresses entries"
                )
            if info.CRC and "/data/" not in info.filename:
                # read() verifies the checksum, but torch.load does not.
                data = archive.read(info)
                if info.filename.endswith("/byteorder") and data != b"little":
                    raise CheckpointError(f"{self._path} was written on a big-endian machine")
            self._stream.seek(info.header_offset)
            header = self._stream.read(30)
            if len(header) < 30:
                raise Corrupt(
                    f"{self._path} is a damaged archive: entry {info.filename} is missing"
                )
            # The local header's lengths may differ from those in the central directory.
            name, extra = struct.unpack_from("<HH", header, 26)
            self._records[info.header_offset + 30 + name + extra] = info

    def _load_skeleton(self, allow_pickle: bool) -> Mapping[Any, Any]:
        """Loads the saved dict with meta tensors, whose storages have offsets in the file."""
        try:
            self._stream.seek(0)
            loaded = torch.load(self._stream, map_location="meta", weights_only=not allow_pickle)
        except pickle.UnpicklingError as error:
            if allow_pickle:
                raise Corrupt(f"{self._path}: {first_line(error)}") from error
            raise Unsafe(
                f"{self._path} contains types that are not allow-listed, or is damaged. If you "
                "trust its writer, pass allow_pickle=True (--allow-pickle), or allow your own "
                "types with torch.serialization.add_safe_globals([...])"
            ) from error
        except OSError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{self._path} cannot be read tensor by tensor ({first_line(error)}). Quantized, "
                "sparse and nested tensors, and subclasses of Tensor, cannot be converted"
            ) from error
        if not isinstance(loaded, Mapping):
            raise CheckpointError(
                f"{self._path} contains a {type(loaded).__name__}, but only a dict can be converted"
            )
        return loaded

    def _list(self, loaded: Mapping[Any, Any]) -> None:
        self._note_losses(loaded)
        try:
            flat, self.paths = flatten_state_dict(dict(loaded))
        except ValueError as error:
            raise CheckpointError(
                f"{self._path}: two values have the same name: {error}"
            ) from error
        sharing: dict[int, list[str]] = defaultdict(list)
        for name, value in flat.items():
            if not isinstance(value, torch.Tensor):
                self.objects.append(name)
                self._objects[name] = value
                continue
            view = self._find_view(name, value)
            self._views[name] = view
            self.tensors[name] = view.entry
            if value.numel():
                sharing[view.begin].append(name)
        for names in sharing.values():
            if len(names) > 1:
                self.notes.append(
                    f"tensors share memory in the source, but not in the target: {some_of(names)}"
                )

    def _note_losses(self, loaded: Mapping[Any, Any]) -> None:
        """Adds notes about empty dicts and key types, which are lost in a conversion."""
        empty_dicts: list[str] = []
        keys: list[str] = []

        def walk(value: Any, path: str) -> None:
            if isinstance(value, Mapping):
                if not value and path:
                    empty_dicts.append(path)
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
        if empty_dicts:
            self.notes.append(f"left out empty dicts: {some_of(empty_dicts)}")
        if keys:
            self.notes.append(f"converted keys to strings: {some_of(keys)}")

    def _find_view(self, name: str, value: torch.Tensor) -> _View:
        plain = type(value) in (torch.Tensor, torch.nn.Parameter)
        if not plain or value.layout != torch.strided or value.dtype in QUANTIZED:
            raise CheckpointError(
                f"{self._path}: {name} is a {type(value).__name__} ({value.layout}, "
                f"{value.dtype}), but only plain tensors can be converted"
            )
        storage = value.untyped_storage()
        begin = getattr(storage, "_checkpoint_offset", None)
        if begin is None:
            raise CheckpointError(f"{self._path}: {name} is a meta tensor, which has no data")
        record = self._records.get(begin)
        if record is None or record.file_size != storage.nbytes():
            raise Corrupt(
                f"{self._path}: the archive has no record that matches the storage of {name}"
            )
        strides, offset = value.stride(), int(value.storage_offset())
        entry = Entry(value.dtype, tuple(value.shape))
        is_conj, is_neg = bool(value.is_conj()), bool(value.is_neg())
        return _View(entry, begin, storage.nbytes(), offset, strides, is_conj, is_neg)

    def _read(self, names: list[str]) -> list[torch.Tensor]:
        return [self._read_view(name, self._views[name]) for name in names]

    def _read_view(self, name: str, view: _View) -> torch.Tensor:
        entry = view.entry
        if 0 in entry.shape:
            return allocate_tensor(entry.shape, entry.dtype)
        width = entry.dtype.itemsize
        # Number of elements from the tensor's first element to its last.
        pairs = zip(entry.shape, view.stride, strict=True)
        span = 1 + sum((size - 1) * stride for size, stride in pairs)
        if view.offset * width > view.storage_bytes - span * width:
            raise Corrupt(f"{self._path}: {name} exceeds its storage")
        is_complete = span * width == view.storage_bytes
        if not is_complete:
            self._verify_record(name, view.begin)
        self._stream.seek(view.begin + view.offset * width)
        data = read_exactly(self._stream, span * width, self._path, name)
        checksum = self._records[view.begin].CRC
        # A checksum of 0 means that the file was saved without checksums.
        if is_complete and checksum and _core.crc32(data) != checksum:
            raise Corrupt(f"{self._path}: the data of {name} does not match its checksum")
        as_bytes = torch.frombuffer(data, dtype=torch.uint8)
        # torch cannot copy every dtype, so copy as a dtype of the same width.
        movable = as_bytes.view(_SAME_WIDTH[width]).as_strided(entry.shape, view.stride)
        tensor = movable.contiguous().view(entry.dtype)
        if view.is_conj:
            tensor = tensor.conj().resolve_conj()
        return tensor.neg() if view.is_neg else tensor

    def _verify_record(self, name: str, begin: int) -> None:
        """Verifies a record's checksum, unless it was verified before."""
        info = self._records[begin]
        if begin in self._verified or not info.CRC:
            return
        self._stream.seek(begin)
        checksum, left = 0, info.file_size
        while left:
            piece = read_exactly(self._stream, min(left, _PIECE_BYTES), self._path, name)
            checksum = _core.crc32(piece, checksum)
            left -= len(piece)
        if checksum != info.CRC:
            raise Corrupt(f"{self._path}: the data of {name} does not match its checksum")
        self._verified.add(begin)

    def _read_object(self, name: str) -> Any:
        def materialize(value: torch.Tensor) -> torch.Tensor:
            return self._read_view(name, self._find_view(name, value))

        value = pytree.tree_map_only(torch.Tensor, materialize, self._objects[name])
        _HiddenTensors(f"{self._path}: {name}").dump(value)
        return value

    def close(self) -> None:
        self._stream.close()


class _HiddenTensors(pickle.Pickler):
    """Refuses an object that still has meta tensors. Their data would be lost, because only tensors
    in dicts, lists and tuples are read.

    Args:
        title: names the object in the error.
    """

    def __init__(self, title: str) -> None:
        super().__init__(_Nowhere())
        self._title = title

    def persistent_id(self, value: Any) -> str | None:
        if not isinstance(value, torch.Tensor):
            return None
        if value.is_meta:
            raise CheckpointError(
                f"{self._title} is an object with tensors, but only tensors in dicts, lists and "
                "tuples can be converted. Save the object's state_dict() instead"
            )
        return ""  # without the data


class _Nowhere(io.RawIOBase):
    """A file that keeps nothing."""

    def write(self, data: Any) -> int:
        return len(data)


# Dtypes for copying elements, by size in bytes.
_SAME_WIDTH = {**BITS, 16: torch.complex128}
