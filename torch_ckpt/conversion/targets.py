"""Writes targets for ``convert``: safetensors files and checkpoint directories.

A target appears only when it is complete. conversion/target_directory.py publishes files, and a
checkpoint is committed like any save. torch_target.py writes ``torch.save`` files. At a URL, a
safetensors file is one upload, and a checkpoint is saved by the target of ``save``.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.storage import WriteResult

from torch_ckpt import _C, _core
from torch_ckpt._base.paths import is_url
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.folders import RemoteFolder
from torch_ckpt.checkpoint.publishing import exists_error, require_absent
from torch_ckpt.checkpoint.reading import in_waves
from torch_ckpt.checkpoint.tensor_bytes import as_bytes, host_pieces
from torch_ckpt.conversion.input import Entry, Input, Path
from torch_ckpt.conversion.target_directory import published_directory, published_file
from torch_ckpt.errors import CheckpointError
from torch_ckpt.huggingface.transformers_config import CONFIG_NAME
from torch_ckpt.options import WriteOptions
from torch_ckpt.saving.items import encoded_with, resolve, results_of
from torch_ckpt.saving.object_target import ObjectTarget
from torch_ckpt.saving.target import DirectoryTarget
from torch_ckpt.saving.write import Written, write_files
from torch_ckpt.stores import open_store
from torch_ckpt.stores.folder import ObjectFolder


@dataclass(frozen=True)
class Output:
    """An output to write."""

    path: str
    overwrite: bool  # replace an existing target
    wave_bytes: int  # maximum number of tensor bytes to hold in memory
    storage_options: Mapping[str, Any] | None  # for a URL
    # Called with the number of tensor bytes written since the last call.
    wrote: Callable[[int], None]


#: Writes a target and returns the paths of its files.
Write = Callable[[Input, Output], list[str]]


def read_in_waves(
    source: Input, tensors: Mapping[str, Entry], target: Output
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields tensors, reading several at a time. Releases each one when the next is requested."""
    for wave in in_waves(_sizes(tensors), target.wave_bytes):
        read = source.read(wave)[::-1]
        for name in wave:
            yield name, read.pop()


def _write(
    directory: OpenDirectory | ObjectFolder, prefix: str, sources: _C.SaveSources, target: Output
) -> Written:
    """Writes values with the engine."""
    title = f"save {os.path.basename(target.path)}"
    return write_files(
        _C.Save(), directory, prefix, sources, WriteOptions(), title=title, rank=None
    )


def _sizes(tensors: Mapping[str, Entry]) -> Iterator[tuple[str, int]]:
    return ((name, entry.nbytes) for name, entry in tensors.items())


# --- safetensors ---------------------------------------------------------------------------------


def require_safetensors(source: Input) -> None:
    """Raises CheckpointError if safetensors cannot hold a tensor's dtype, shape or name."""
    for name, entry in source.tensors.items():
        try:
            _core.require_safe(name, _dtype_name(entry), entry.shape)
        except ValueError as error:
            raise CheckpointError(str(error)) from None


def _dtype_name(entry: Entry) -> str:
    return str(entry.dtype).removeprefix("torch.")


def write_safetensors(source: Input, target: Output) -> list[str]:
    """Writes one file and returns its path."""
    tensors, header = _lay_out(source, source.tensors)
    pieces = _safetensors_pieces(source, tensors, header, target)
    if is_url(target.path):
        _upload(pieces, len(header) + sum(entry.nbytes for entry in tensors.values()), target)
    else:
        with published_file(target.path, overwrite=target.overwrite) as stream:
            for piece in pieces:
                stream.write(piece)
    return [target.path]


def write_safetensors_shards(
    source: Input, target: Output, *, max_shard_size: int, config: bytes | None
) -> list[str]:
    """Writes a directory of files, with an index, a configuration and the checksums of all of them,
    as a save does. Returns the paths.

    Each file has at most ``max_shard_size`` bytes of tensors, or a single larger tensor.
    """
    specs = [(name, _dtype_name(e), list(e.shape)) for name, e in source.tensors.items()]
    metadata = [*(source.metadata or {"format": "pt"}).items()]
    try:
        layout = _core.SafetensorsLayout.of_tensors(specs, None, max_shard_size, metadata)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    copied = {} if config is None else {CONFIG_NAME: config}
    numbers = {name: number for number, name in enumerate(source.tensors)}
    tables: list[dict[str, bytes]] = []
    with (
        published_directory(target.path, target.overwrite, copied) as (directory, save),
        closing(OpenDirectory(directory)) as opened,
    ):
        for wave in in_waves(_sizes(source.tensors), target.wave_bytes):
            entries = [source.tensors[name] for name in wave]
            parts = [
                (numbers[name], [0] * len(entry.shape), list(entry.shape))
                for name, entry in zip(wave, entries, strict=True)
            ]
            (places,) = layout.places_of_parts([parts], [b""])
            sources = _C.SaveSources()
            sources.set_places(places)
            for name, value in zip(wave, source.read(wave), strict=True):
                sources.add_part(name, value, value.shape, [0] * value.dim(), None)
            tables.append(_write(opened, "", sources, target).files.tables)
            target.wrote(sum(entry.nbytes for entry in entries))
        save.complete(layout, [*copied.items()], tables, True)
        names = sorted(os.listdir(directory))
    return [os.path.join(target.path, name) for name in names]


def _lay_out(source: Input, tensors: Mapping[str, Entry]) -> tuple[dict[str, Entry], bytes]:
    """Returns a file's tensors in their stored order, and its header."""
    # Store wide elements first, so that readers can map each tensor at its element alignment.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    specs = [(name, _dtype_name(tensors[name]), tensors[name].shape) for name in order]
    metadata = source.metadata or {"format": "pt"}
    try:
        header = _core.encode_safetensors_header(specs, metadata, alignment=8)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    return {name: tensors[name] for name in order}, header


def _safetensors_pieces(
    source: Input, tensors: Mapping[str, Entry], header: bytes, target: Output
) -> Iterator[memoryview]:
    """Yields the contents of a file."""
    yield memoryview(header)
    for _name, tensor in read_in_waves(source, tensors, target):
        yield from host_pieces(as_bytes(tensor))
        target.wrote(tensor.nbytes)


def _upload(pieces: Iterator[memoryview], bytes: int, target: Output) -> None:
    """Stores a file at a URL."""
    folder, name = os.path.split(target.path)
    store = open_store(folder, target.storage_options)
    if not target.overwrite and store.find(name) is not None:
        raise exists_error(target.path)
    store.put(name, pieces, bytes)


# --- checkpoint directories ----------------------------------------------------------------------


class _Planner(DefaultSavePlanner):
    """torch's planner, used with meta tensors."""

    def set_up(self, source: Input, storage_meta: StorageMeta) -> None:
        """Prepares a plan for all values of a source."""
        values: dict[str, Any] = {}
        for name, entry in source.tensors.items():
            values[name] = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        for name in source.objects:
            values[name] = source.read_object(name)
        self.set_up_planner({}, storage_meta, True)
        order = [name for name in source.paths if name in values]
        self.state_dict = {name: values[name] for name in order}
        self.mappings: dict[str, Path] = {name: source.paths[name] for name in order}


def write_dcp(source: Input, target: Output) -> list[str]:
    """Writes a checkpoint, a few tensors at a time, and returns its path."""
    path = target.path
    is_new = not is_url(path) and not os.path.lexists(path)
    written_to = _open_target(target)
    storage_meta = written_to.storage_meta()
    planner = _Planner()
    planner.set_up(source, storage_meta)
    (plan,), metadata = planner.create_global_plan([planner.create_local_plan()])
    items = {item.index.fqn: item for item in plan.items}
    results: list[WriteResult] = []
    waves = itertools.count()
    written_to.open(0, 1)
    directory = written_to.directory

    def write(names: list[str], values: list[Any]) -> None:
        sources = _C.SaveSources()
        for name, value in zip(names, values, strict=True):
            sources.add(name, value)
        prefix = f"__0_{written_to.tag}"
        if isinstance(directory, ObjectFolder):
            prefix += f"{next(waves)}_"
        else:
            prefix = _core.choose_prefix(directory, prefix)
        written = _write(directory, prefix, sources, target)
        results.extend(results_of([items[name] for name in names], written))

    try:
        write(source.objects, [resolve(planner, items[name]) for name in source.objects])
        for wave in in_waves(_sizes(source.tensors), target.wave_bytes):
            write(wave, source.read(wave))
            target.wrote(sum(source.tensors[name].nbytes for name in wave))
        data = encoded_with([results], metadata, storage_meta, directory)
        written_to.publish(data, {result.storage_data.relative_path for result in results})
    except BaseException:
        # Remove the files of all waves.
        written_to.discard()
        if is_new:
            with suppress(OSError):
                os.rmdir(path)
        raise
    written_to.discard()
    return [path]


def _open_target(target: Output) -> DirectoryTarget | ObjectTarget:
    """Returns the target of a checkpoint.

    Raises:
        FileExistsError: there are files, and they must not be replaced.
    """
    path = target.path
    options = WriteOptions(overwrite=target.overwrite, storage_options=target.storage_options)
    if not is_url(path):
        if os.path.lexists(path) and not (os.path.isdir(path) and not os.listdir(path)):
            require_absent(path, target.overwrite)
        return DirectoryTarget(path, options)
    if not target.overwrite:
        with suppress(FileNotFoundError):
            RemoteFolder(path, target.storage_options).names()
            raise exists_error(target.path)
    return ObjectTarget(open_store(path, target.storage_options), options)
