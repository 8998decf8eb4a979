"""Files of torch.save as sources."""

from __future__ import annotations

import errno
import pickle
import struct
import zipfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.utils import _pytree as pytree

from torch_ckpt import _core
from torch_ckpt._base.formatting import some_of
from torch_ckpt.conversion.source import Entry, Source, allocate_tensor, first_line, read_exactly
from torch_ckpt.errors import CheckpointError, Corrupt, Unsafe
from torch_ckpt.inspection.stored_tensors import QUANTIZED

# Its files are read in pieces of this size where they are only checked.
_PIECE_BYTES = 1 << 20


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
            reason = first_line(error)
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
                raise Corrupt(f"{self._path}: {first_line(error)}") from error
            raise Unsafe(
                f"{self._path} holds more than tensors and plain values, or is damaged; "
                "pass allow_pickle=True (--allow-pickle) only if you trust its writer, or declare "
                "types of your own by torch.serialization.add_safe_globals([...])"
            ) from error
        except OSError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{self._path} cannot be read tensor by tensor ({first_line(error)}); quantized, "
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
            self.notes.append(f"keys that are not strings become strings: {some_of(keys)}")

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
            return allocate_tensor(entry)
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
        if is_whole and checksum and _core.crc32(data) != checksum:
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
            checksum = _core.crc32(piece, checksum)
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
