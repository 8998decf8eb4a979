"""Output for ``convert``: ``torch.save`` files."""

from __future__ import annotations

import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element

from torch_ckpt._base.formatting import some_of
from torch_ckpt.checkpoint.tensor_bytes import host_pieces
from torch_ckpt.conversion.input import Entry, Input
from torch_ckpt.conversion.targets import Output, read_in_waves, write_file
from torch_ckpt.errors import Corrupt
from torch_ckpt.state.splitting import as_states

# A larger write contains a storage, because names and padding have at most 64 KiB each.
_COPIED_BYTES = 1 << 20


class _Storage:
    """Placeholder for the storage of a tensor whose data is written later."""

    def __init__(self, key: int, entry: Entry) -> None:
        self.key = key
        self.entry = entry

    def persistent_id(self) -> tuple[str, Any, str, str, int]:
        """Returns the persistent ID from which torch's unpickler creates the storage."""
        if self.entry.dtype in _UNTYPED:
            return "storage", torch.UntypedStorage, str(self.key), "cpu", self.entry.nbytes
        kind = getattr(torch, _TYPED[self.entry.dtype])
        return "storage", kind, str(self.key), "cpu", self.entry.nbytes // self.entry.dtype.itemsize


_UNTYPED = torch.storage._new_dtypes()
_TYPED: dict[torch.dtype, str] = torch.storage._dtype_to_storage_type_map()


class _Placeholder:
    """Placeholder for a tensor whose data is written later."""

    def __init__(self, name: str, entry: Entry) -> None:
        self.name = name
        self.entry = entry


class _Pickler(pickle.Pickler):
    """Pickles as torch.save does, but writes references instead of tensor data.

    Attributes:
        storages: for each key, a tensor's name, or the storage of a tensor inside an object.
    """

    def __init__(self, stream: Any) -> None:
        # torch.save's protocol, the latest one that torch.load(weights_only=True) reads.
        super().__init__(stream, protocol=2)
        self.storages: list[str | torch.UntypedStorage] = []
        self._keys: dict[int, int] = {}

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, _Placeholder):
            return NotImplemented
        entry = value.entry
        storage = _Storage(len(self.storages), entry)
        self.storages.append(value.name)
        strides = torch.empty(entry.shape, device="meta").stride()
        hooks: OrderedDict[Any, Any] = OrderedDict()
        arguments = (storage, 0, entry.shape, strides, False, hooks)
        if entry.dtype in _UNTYPED:
            return torch._utils._rebuild_tensor_v3, (*arguments, entry.dtype)
        return torch._utils._rebuild_tensor_v2, arguments

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, _Storage):
            return value.persistent_id()
        # Pickle storages of tensors inside objects as torch.save does.
        storage: Any = value
        if isinstance(value, torch.storage.TypedStorage):
            kind, count, storage = _TYPED[value.dtype], storage._size(), value._untyped_storage
        elif torch.is_storage(value):
            kind, count = "UntypedStorage", storage.nbytes()
        else:
            return None
        key = self._keys.setdefault(storage._cdata, len(self.storages))
        if key == len(self.storages):
            self.storages.append(storage.cpu())
        return "storage", getattr(torch, kind), str(key), "cpu", count


def write_torch(source: Input, target: Output) -> list[str]:
    """Writes one file for torch.load, nested like the source, and returns its path."""
    objects = {name: source.read_object(name) for name in source.objects}
    # Check them before as_states() below puts tensor placeholders into them.
    refused = [name for name, value in objects.items() if not _is_safe(as_states(value))]
    if refused:
        source.notes.append(
            "to load the target, pass weights_only=False to torch.load, or convert again without "
            f"these objects: {some_of(refused)}"
        )
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    pickler.dump(as_states(_nest(source, objects)))
    texts = {
        "data.pkl": pickled.getvalue(),
        ".format_version": b"1",
        ".storage_alignment": b"64",
        "byteorder": sys.byteorder.encode(),
    }
    # The tensors come first, then the tensors inside objects.
    storages = enumerate(pickler.storages)
    stored = {key: one for key, one in storages if isinstance(one, torch.UntypedStorage)}
    keys = {one: key for key, one in enumerate(pickler.storages) if isinstance(one, str)}
    tensors = {name: source.tensors[name] for name in keys}

    def pieces() -> Iterator[memoryview]:
        output = _Pieces()
        with _archive(output) as archive:
            for record, text in texts.items():
                archive.write_record(record, text, len(text))
            for name, tensor in read_in_waves(source, tensors, target):
                storage = tensor.untyped_storage()
                assert storage.nbytes() == tensor.nbytes
                yield from output.of_record(archive, keys[name], storage)
                target.wrote(tensor.nbytes)
            for key, storage in stored.items():
                yield from output.of_record(archive, key, storage)
        yield from output.take()

    sizes = {record: len(text) for record, text in texts.items()}
    sizes |= {f"data/{keys[name]}": entry.nbytes for name, entry in tensors.items()}
    sizes |= {f"data/{key}": storage.nbytes() for key, storage in stored.items()}
    return write_file(target, pieces(), _archive_bytes(sizes))


class _Pieces:
    """A file to which an archive is written: the bytes that have not been taken yet."""

    def __init__(self) -> None:
        self._pieces: list[memoryview] = []
        # The storage that is being written.
        self._storage: torch.UntypedStorage | None = None

    def write(self, data: memoryview) -> None:
        """Keeps bytes. Copies them, unless they are a storage: other memory is valid only during
        the call."""
        if self._storage is None or data.nbytes <= _COPIED_BYTES:
            self._pieces.append(memoryview(bytes(data)))
            return
        assert data.nbytes == self._storage.nbytes()
        stored = torch.empty(0, dtype=torch.uint8).set_(self._storage)
        self._pieces.extend(host_pieces(stored))

    def of_record(self, archive: Any, key: int, storage: torch.UntypedStorage) -> list[memoryview]:
        """Writes a storage, and takes all bytes."""
        self._storage = storage
        archive.write_record(f"data/{key}", storage, storage.nbytes())
        self._storage = None
        return self.take()

    def take(self) -> list[memoryview]:
        """Returns the bytes that were written since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces


class _Count:
    """A file to which only the descriptions of records are written. Counts the bytes."""

    bytes = 0

    def write(self, data: memoryview) -> None:
        self.bytes += data.nbytes

    def seek(self, count: int, _whence: int) -> None:
        """Skips the data of a record."""
        self.bytes += count


def _archive_bytes(records: Mapping[str, int]) -> int:
    """Returns the size of an archive, given the size of each record."""
    count = _Count()
    with _archive(count) as archive:
        for record, bytes in records.items():
            archive.write_record_metadata(record, bytes)
    return count.bytes


@contextmanager
def _archive(file: _Pieces | _Count) -> Iterator[Any]:
    archive: Any = torch._C.PyTorchFileWriter(file)  # type: ignore[call-overload]
    try:
        yield archive
    except BaseException:
        # The destructor would otherwise do this, and an exception there would end the process.
        with suppress(Exception):
            archive.write_end_of_file()
        raise
    archive.write_end_of_file()


def _is_safe(value: Any) -> bool:
    """True if ``torch.load(weights_only=True)`` accepts an object."""
    stored = io.BytesIO()
    torch.save(value, stored)
    stored.seek(0)
    try:
        torch.load(stored, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError:
        return False
    return True


def _nest(source: Input, objects: Mapping[str, Any]) -> dict[Any, Any]:
    """Returns nested dicts and lists of objects and tensor placeholders."""
    nested: dict[Any, Any] = {}
    known = {*source.tensors, *objects}
    for name in filter(known.__contains__, source.paths):
        entry = source.tensors.get(name)
        value = objects[name] if entry is None else _Placeholder(name, entry)
        try:
            set_element(nested, source.paths[name], value)
        except (TypeError, AttributeError, KeyError, IndexError, AssertionError) as error:
            raise Corrupt(
                f"{name}: its path {source.paths[name]} contradicts the path of another value: "
                f"{error}"
            ) from error
    return nested
