"""What ``convert`` writes. A target is complete, or it is not there: files of safetensors and of
``torch.save`` are published by conversion/publishing.py, a checkpoint directory is committed as
any save.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, BinaryIO, Protocol

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from torch_ckpt import _core
from torch_ckpt._base.formatting import some_of
from torch_ckpt.checkpoint.publishing import new_file, require_absent
from torch_ckpt.conversion.publishing import published_directory, published_file
from torch_ckpt.conversion.safetensors_header import (
    DTYPES,
    METADATA_KEY,
    MOST_DIMENSIONS,
    encode_header,
    is_unicode,
)
from torch_ckpt.conversion.source import Entry, Path, Source
from torch_ckpt.conversion.transformers_config import CONFIG_NAME
from torch_ckpt.errors import CheckpointError
from torch_ckpt.loading.reading import in_waves
from torch_ckpt.saving.items import resolve, results_of
from torch_ckpt.saving.writer import FileSystemWriter

#: Called with the number of bytes of tensors that have been written.
Wrote = Callable[[int], None]


class Write(Protocol):
    """Writes a target and returns the paths of its files."""

    def __call__(
        self, source: Source, target: str, *, overwrite: bool, wave_bytes: int, wrote: Wrote
    ) -> list[str]: ...


def each_in_waves(
    source: Source, tensors: Mapping[str, Entry], wave_bytes: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Reads tensors in waves, and lets go of each when the next one is taken."""
    for wave in in_waves(_sizes(tensors), wave_bytes):
        read = source.read(wave)[::-1]
        for name in wave:
            yield name, read.pop()


def _sizes(tensors: Mapping[str, Entry]) -> Iterator[tuple[str, int]]:
    return ((name, entry.nbytes) for name, entry in tensors.items())


# --- safetensors ---------------------------------------------------------------------------------


def require_safetensors(source: Source) -> None:
    """Raises CheckpointError where the format does not hold a tensor's dtype, shape or name."""
    known = set(DTYPES.values())
    others = [f"{n} ({e.dtype})" for n, e in source.tensors.items() if e.dtype not in known]
    if others:
        raise CheckpointError(f"safetensors files do not hold these dtypes: {some_of(others)}")
    for name, entry in source.tensors.items():
        if entry.dtype == DTYPES.get("F4") and not entry.shape:
            raise CheckpointError(
                f"{name}: safetensors files pack {entry.dtype} in pairs along a row"
            )
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
    shards = list(in_waves(_sizes(source.tensors), max_shard_size)) or [[]]
    count = len(shards)
    names = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    if count == 1:
        names = ["model.safetensors"]
    layouts = [_laid_out(source, {name: source.tensors[name] for name in of}) for of in shards]
    with published_directory(target, overwrite) as directory:
        for file, layout in zip(names, layouts, strict=True):
            with new_file(os.path.join(directory, file)) as stream:
                _write_safetensors(source, layout, stream, wave_bytes, wrote)
        if count > 1:
            places = {n: file for file, of_file in zip(names, shards, strict=True) for n in of_file}
            total = sum(entry.nbytes for entry in source.tensors.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
            names.append("model.safetensors.index.json")
            with new_file(os.path.join(directory, names[-1])) as stream:
                stream.write(json.dumps(index, indent=2).encode() + b"\n")
        if config is not None:
            names.append(CONFIG_NAME)
            with new_file(os.path.join(directory, CONFIG_NAME)) as stream:
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
    for _name, tensor in each_in_waves(source, tensors, wave_bytes):
        if tensor.nbytes:
            stream.write(_bytes_of(tensor))
        wrote(tensor.nbytes)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Its memory, for as long as it is there; torch may be installed without numpy."""
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(memory)


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
        prefix = _core.choose_prefix(writer.directory, f"__0_{writer.tag}")
        written = writer.write_values(prefix, names, values)
        results.extend(results_of([items[name] for name in names], written))

    try:
        write(source.objects, [resolve(planner, items[name]) for name in source.objects])
        for wave in in_waves(_sizes(source.tensors), wave_bytes):
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
