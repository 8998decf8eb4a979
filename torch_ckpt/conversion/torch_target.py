"""Output for ``convert``: ``torch.save`` files."""

from __future__ import annotations

import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint._traverse import set_element

from torch_ckpt._base.formatting import some_of
from torch_ckpt.conversion.input import Entry, Input
from torch_ckpt.conversion.target_directory import published_file
from torch_ckpt.conversion.targets import Output, read_in_waves
from torch_ckpt.errors import Corrupt
from torch_ckpt.state.splitting import as_states


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
    with (
        published_file(target.path, overwrite=target.overwrite) as stream,
        _archive(stream) as archive,
    ):
        data = pickled.getvalue()
        archive.write_record("data.pkl", data, len(data))
        for name, text in (
            (".format_version", "1"),
            (".storage_alignment", "64"),
            ("byteorder", sys.byteorder),
        ):
            archive.write_record(name, text.encode(), len(text))
        keys = {stored: key for key, stored in enumerate(pickler.storages) if type(stored) is str}
        tensors = {name: source.tensors[name] for name in keys}
        for name, tensor in read_in_waves(source, tensors, target):
            storage = tensor.untyped_storage()
            assert storage.nbytes() == tensor.nbytes
            archive.write_record(f"data/{keys[name]}", storage, tensor.nbytes)
            target.wrote(tensor.nbytes)
        for key, stored in enumerate(pickler.storages):
            if isinstance(stored, torch.UntypedStorage):
                archive.write_record(f"data/{key}", stored, stored.nbytes())
    return [target.path]


@contextmanager
def _archive(stream: BinaryIO) -> Iterator[Any]:
    archive = torch._C.PyTorchFileWriter(stream)
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
