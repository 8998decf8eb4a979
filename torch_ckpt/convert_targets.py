"""What ``convert`` writes. A target is complete, or it is not there.

1. A file is written under a temporary name beside its own, fsynced, renamed, and the directory
   fsynced; several files in a directory of a temporary name that is renamed.
2. A checkpoint directory is committed as any save (``writer.py``).
3. After a failure, or Ctrl-C, what was written is removed; but where only the last fsync of the
   directory has failed, the target stays. What a killed process leaves has a name
   that begins with a dot and holds ``.tmp-``.
"""

from __future__ import annotations

import ctypes
import errno
import io
import json
import os
import pickle
import re
import shutil
import sys
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import Any, BinaryIO, Protocol

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from torch_ckpt import _C
from torch_ckpt.app_state import as_states
from torch_ckpt.convert_sources import Entry, Path, Source
from torch_ckpt.directory import OpenDirectory
from torch_ckpt.errors import CheckpointError, Corrupt, DurabilityUncertain
from torch_ckpt.generations import choose_prefix
from torch_ckpt.safetensors_format import (
    DTYPES,
    METADATA_KEY,
    MOST_DIMENSIONS,
    encode_header,
    is_unicode,
)
from torch_ckpt.text import some_of
from torch_ckpt.writer import FileSystemWriter, resolve, results_of

#: Called with the number of bytes of tensors that have been written.
Wrote = Callable[[int], None]


class Write(Protocol):
    """Writes a target and returns the paths of its files."""

    def __call__(
        self, source: Source, target: str, *, overwrite: bool, wave_bytes: int, wrote: Wrote
    ) -> list[str]: ...


#: What transformers reads a model's configuration from.
CONFIG_NAME = "config.json"

_OUR_NAME = re.compile(
    r"^model(-\d{5,}-of-\d{5,})?\.safetensors$|^model\.safetensors\.index\.json$|^config\.json$"
)


def in_waves(tensors: Mapping[str, Entry], wave_bytes: int) -> Iterator[list[str]]:
    """Names whose tensors are held in memory together: so many bytes, or one that is larger."""
    wave: list[str] = []
    held = 0
    for name, entry in tensors.items():
        if wave and held + entry.nbytes > wave_bytes:
            yield wave
            wave, held = [], 0
        wave.append(name)
        held += entry.nbytes
    if wave:
        yield wave


def _each(
    source: Source, tensors: Mapping[str, Entry], wave_bytes: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Reads tensors in waves, and lets go of each when the next one is taken."""
    for wave in in_waves(tensors, wave_bytes):
        read = source.read(wave)[::-1]
        for name in wave:
            yield name, read.pop()


# --- safetensors ---------------------------------------------------------------------------------


def require_safetensors(source: Source) -> None:
    """Raises CheckpointError where the format does not hold a tensor's dtype, shape or name."""
    known = set(DTYPES.values())
    others = [f"{n} ({e.dtype})" for n, e in source.tensors.items() if e.dtype not in known]
    if others:
        raise CheckpointError(f"safetensors files do not hold these dtypes: {some_of(others)}")
    for name, entry in source.tensors.items():
        if entry.dtype == DTYPES.get("F4") and not entry.shape:
            raise CheckpointError(f"{name}: safetensors files hold {entry.dtype} by pairs in a row")
        if len(entry.shape) > MOST_DIMENSIONS:
            raise CheckpointError(
                f"{name}: it has {len(entry.shape)} dimensions; tensors of safetensors files have "
                f"at most {MOST_DIMENSIONS}"
            )
        if name == METADATA_KEY:
            raise CheckpointError(f"{name}: safetensors files use this name for themselves")
        if not is_unicode(name):
            raise CheckpointError(f"{name!r}: safetensors files have names in UTF-8 only")


def write_safetensors(
    source: Source, target: str, *, overwrite: bool, wave_bytes: int, wrote: Wrote
) -> list[str]:
    """Writes one file; returns its path."""
    layout = _laid_out(source, source.tensors)
    with published_file(target, overwrite) as stream:
        _write_safetensors(source, layout, stream, wave_bytes, wrote)
    return [target]


def write_safetensors_shards(
    source: Source,
    target: str,
    *,
    max_shard_size: int,
    config: bytes | None,
    overwrite: bool,
    wave_bytes: int,
    wrote: Wrote,
) -> list[str]:
    """Writes a directory of files of at most so many bytes of tensors, or one tensor, their index,
    and a configuration; returns the paths."""
    shards = list(in_waves(source.tensors, max_shard_size)) or [[]]
    count = len(shards)
    names = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    if count == 1:
        names = ["model.safetensors"]
    layouts = [_laid_out(source, {name: source.tensors[name] for name in of}) for of in shards]
    with published_directory(target, overwrite) as directory:
        for file, layout in zip(names, layouts, strict=True):
            with _new_file(os.path.join(directory, file)) as stream:
                _write_safetensors(source, layout, stream, wave_bytes, wrote)
        if count > 1:
            places = {n: file for file, of_file in zip(names, shards, strict=True) for n in of_file}
            total = sum(entry.nbytes for entry in source.tensors.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
            names.append("model.safetensors.index.json")
            with _new_file(os.path.join(directory, names[-1])) as stream:
                stream.write(json.dumps(index, indent=2).encode() + b"\n")
        if config is not None:
            names.append(CONFIG_NAME)
            with _new_file(os.path.join(directory, CONFIG_NAME)) as stream:
                stream.write(config)
    return [os.path.join(target, name) for name in names]


def _laid_out(source: Source, tensors: Mapping[str, Entry]) -> tuple[dict[str, Entry], bytes]:
    """The tensors of a file in their order there, and its header."""
    # Wide elements first, so that each tensor lies at a multiple of its width: readers map them.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    rows = [(name, tensors[name].dtype, tensors[name].shape) for name in order]
    header = encode_header(rows, source.metadata or {"format": "pt"})
    return {name: tensors[name] for name in order}, header


def _write_safetensors(
    source: Source,
    layout: tuple[dict[str, Entry], bytes],
    stream: BinaryIO,
    wave_bytes: int,
    wrote: Wrote,
) -> None:
    tensors, header = layout
    stream.write(header)
    for _name, tensor in _each(source, tensors, wave_bytes):
        if tensor.nbytes:
            stream.write(_bytes_of(tensor))
        wrote(tensor.nbytes)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Its memory, for as long as it is there; torch may be installed without numpy."""
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(memory)


# --- torch.save ----------------------------------------------------------------------------------


class _Storage:
    """The storage of a tensor that is written later."""

    def __init__(self, key: int, entry: Entry) -> None:
        self.key = key
        self.entry = entry

    def persistent_id(self) -> tuple[str, Any, str, str, int]:
        """What torch's unpickler makes a storage of."""
        if self.entry.dtype in _UNTYPED:
            return "storage", torch.UntypedStorage, str(self.key), "cpu", self.entry.nbytes
        kind = getattr(torch, _TYPED[self.entry.dtype])
        return "storage", kind, str(self.key), "cpu", self.entry.nbytes // self.entry.dtype.itemsize


_UNTYPED = torch.storage._new_dtypes()
_TYPED: dict[torch.dtype, str] = torch.storage._dtype_to_storage_type_map()


class _Later:
    """Takes the place of a tensor until it is pickled."""

    def __init__(self, name: str, entry: Entry) -> None:
        self.name = name
        self.entry = entry


class _Pickler(pickle.Pickler):
    """Pickles as torch.save does; tensors only by where their data will be.

    Attributes:
        storages: names of tensors, and storages of tensors within objects, by their keys.
    """

    def __init__(self, stream: Any) -> None:
        # torch.save's own protocol, which torch.load(weights_only=True) reads.
        super().__init__(stream, protocol=2)
        self.storages: list[str | torch.UntypedStorage] = []
        self._keys: dict[int, int] = {}

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, _Later):
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
        # Of tensors within objects, as torch.save has it; none of this has types.
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


def write_torch(
    source: Source, target: str, *, overwrite: bool, wave_bytes: int, wrote: Wrote
) -> list[str]:
    """Writes one file that torch.load reads, nested as the source is; returns its path."""
    objects = {name: source.object(name) for name in source.objects}
    # Before they get their tensors.
    refused = [name for name, value in objects.items() if not _is_plain(as_states(value))]
    if refused:
        source.notes.append(
            "torch.load takes these with weights_only=False alone, so leave them out where that is "
            f"not wanted: {some_of(refused)}"
        )
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    pickler.dump(as_states(_nested(source, objects)))
    with published_file(target, overwrite) as stream, _archive(stream) as archive:
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
        for name, tensor in _each(source, tensors, wave_bytes):
            storage = tensor.untyped_storage()
            assert storage.nbytes() == tensor.nbytes
            archive.write_record(f"data/{keys[name]}", storage, tensor.nbytes)
            wrote(tensor.nbytes)
        for key, stored in enumerate(pickler.storages):
            if isinstance(stored, torch.UntypedStorage):
                archive.write_record(f"data/{key}", stored, stored.nbytes())
    return [target]


@contextmanager
def _archive(stream: BinaryIO) -> Iterator[Any]:
    archive = torch._C.PyTorchFileWriter(stream)
    try:
        yield archive
    except BaseException:
        # Its destructor would do it, where an exception ends the process.
        with suppress(Exception):
            archive.write_end_of_file()
        raise
    archive.write_end_of_file()


def _is_plain(value: Any) -> bool:
    """Whether ``torch.load(weights_only=True)`` takes an object."""
    stored = io.BytesIO()
    torch.save(value, stored)
    stored.seek(0)
    try:
        torch.load(stored, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError:
        return False
    return True


def _nested(source: Source, objects: Mapping[str, Any]) -> dict[Any, Any]:
    """Tensors, which are written later, and objects where they belong."""
    nested: dict[Any, Any] = {}
    known = {*source.tensors, *objects}
    for name in filter(known.__contains__, source.paths):
        entry = source.tensors.get(name)
        value = objects[name] if entry is None else _Later(name, entry)
        try:
            set_element(nested, source.paths[name], value)
        except (TypeError, AttributeError, KeyError, IndexError, AssertionError) as error:
            raise Corrupt(
                f"{name}: its path {source.paths[name]} does not go with those of others: {error}"
            ) from error
    return nested


# --- a checkpoint directory ----------------------------------------------------------------------


class _Planner(DefaultSavePlanner):
    """torch's planner over tensors without data."""

    def set_up(self, source: Source, writer: FileSystemWriter) -> None:
        """Sets it up for all of a source."""
        values: dict[str, Any] = {}
        for name, entry in source.tensors.items():
            values[name] = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        for name in source.objects:
            values[name] = source.object(name)
        self.set_up_planner({}, writer.storage_meta(), True)
        order = [name for name in source.paths if name in values]
        self.state_dict = {name: values[name] for name in order}
        self.mappings: dict[str, Path] = {name: source.paths[name] for name in order}


def write_dcp(
    source: Source, target: str, *, overwrite: bool, wave_bytes: int, wrote: Wrote
) -> list[str]:
    """Writes a checkpoint directory, some tensors at a time; returns its path."""
    is_new = not os.path.lexists(target)
    if not is_new and not (os.path.isdir(target) and not os.listdir(target)):
        require_absent(target, overwrite)
    writer = FileSystemWriter(target, overwrite=overwrite)
    planner = _Planner()
    planner.set_up(source, writer)
    (plan,), metadata = planner.create_global_plan([planner.create_local_plan()])
    items = {item.index.fqn: item for item in plan.items}
    results: list[WriteResult] = []
    writer.set_up_for_save(0)

    def write(names: list[str], values: list[Any]) -> None:
        prefix = choose_prefix(writer.directory, f"__0_{writer.tag}")
        written = writer.write_values(prefix, names, values)
        results.extend(results_of([items[name] for name in names], written))

    try:
        write(source.objects, [resolve(planner, items[name]) for name in source.objects])
        for wave in in_waves(source.tensors, wave_bytes):
            write(wave, source.read(wave))
            wrote(sum(source.tensors[name].nbytes for name in wave))
        writer.finish(metadata, [results])
    except BaseException:
        # With it go the files of all waves.
        writer.abandon()
        if is_new:
            with suppress(OSError):
                os.rmdir(target)
        raise
    return [target]


# --- publishing ----------------------------------------------------------------------------------


def require_absent(target: str, overwrite: bool) -> None:
    """Raises FileExistsError where something is there that must not be replaced."""
    if not overwrite and os.path.lexists(target):
        raise FileExistsError(
            errno.EEXIST, "is there already; overwrite=True (--overwrite) replaces it", target
        )


def _temporary(target: str) -> str:
    directory, name = os.path.split(os.path.abspath(target))
    return os.path.join(directory, f".{name}.tmp-{uuid.uuid4().hex[:16]}")


def _sync_directory_of(path: str) -> None:
    """Makes durable that a target has its name.

    Raises:
        DurabilityUncertain: it is there, and may not last.
    """
    try:
        with closing(OpenDirectory(os.path.dirname(os.path.abspath(path)))) as directory:
            directory.sync()
    except OSError as error:
        raise DurabilityUncertain(
            f"{path} is there and complete, but the fsync of its directory failed ({error}): a "
            "power cut may undo it; convert again with overwrite=True (--overwrite)",
            error.errno or 0,
        ) from error


@contextmanager
def _new_file(path: str) -> Iterator[BinaryIO]:
    """A file that is fsynced at the end of the block."""
    try:
        with open(path, "xb") as stream:
            yield stream
            stream.flush()
            _C.fault_point("fsync", path)
            os.fsync(stream.fileno())
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, path) from error


@contextmanager
def published_file(target: str, overwrite: bool) -> Iterator[BinaryIO]:
    """A new file that takes its name at the end of the block; none if the block fails."""
    require_absent(target, overwrite)
    temporary = _temporary(target)
    try:
        with _new_file(temporary) as stream:
            yield stream
        require_absent(target, overwrite)
        os.rename(temporary, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    _sync_directory_of(target)


@contextmanager
def published_directory(target: str, overwrite: bool) -> Iterator[str]:
    """The same with a directory. One that is replaced may hold nothing but files of this kind."""
    _require_ours(target, overwrite)
    temporary, former = _temporary(target), _temporary(target)
    os.mkdir(temporary)
    try:
        yield temporary
        with closing(OpenDirectory(temporary)) as directory:
            directory.sync()
        _require_ours(target, overwrite)
        with suppress(FileNotFoundError):
            os.rename(target, former)
        os.rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        with suppress(FileNotFoundError):
            os.rename(former, target)
        raise
    _sync_directory_of(target)
    shutil.rmtree(former, ignore_errors=True)


def _require_ours(target: str, overwrite: bool) -> None:
    if not os.path.isdir(target):
        require_absent(target, overwrite=False)
        return
    others = [name for name in os.listdir(target) if not _OUR_NAME.match(name)]
    if others:
        raise FileExistsError(
            errno.EEXIST, f"is a directory with other files ({others[0]}); they stay", target
        )
    if os.listdir(target):
        require_absent(target, overwrite)
