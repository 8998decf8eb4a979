"""Writes targets for ``convert``: safetensors files and checkpoints, local or beneath URLs.

A target appears only when it is complete. The values are read a few at a time.

1. :func:`write_file` writes a single file from its contents. torch_target.py writes ``torch.save``
   files in this way.
2. A model of several files and a checkpoint are saves by one rank, so the targets of ``save``
   choose the names, commit, and remove the files of a failed conversion. The plan is made from
   names, dtypes and shapes.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import struct
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch

from torch_ckpt import _C, _core
from torch_ckpt._base.system import is_url
from torch_ckpt.checkpoint.chunks import hash_layout, local_chunks
from torch_ckpt.checkpoint.folders import RemoteFolder
from torch_ckpt.checkpoint.objects import pickled
from torch_ckpt.checkpoint.publishing import (
    add_durability_advice,
    exists_error,
    published_file,
    require_absent,
)
from torch_ckpt.checkpoint.reading import in_waves
from torch_ckpt.checkpoint.tensor_bytes import as_bytes, host_pieces
from torch_ckpt.conversion.input import Entry, Input
from torch_ckpt.huggingface.model_target import Safetensors
from torch_ckpt.huggingface.object_model import model_target
from torch_ckpt.options import WriteOptions
from torch_ckpt.saving.agreed_plan import AgreedPlan
from torch_ckpt.saving.object_target import checkpoint_target
from torch_ckpt.saving.write import Written, write_files
from torch_ckpt.stores import open_store
from torch_ckpt.stores.folder import ObjectFolder

_ADVICE = ". Convert again with overwrite=True (--overwrite)"

# Alignment of the data in a file of a model (csrc/planning/safetensors_layout.cpp), and of the data
# in a single file.
_MODEL_ALIGNMENT, _FILE_ALIGNMENT = 4096, 8


@dataclass(frozen=True)
class Output:
    """An output to write."""

    path: str
    overwrite: bool  # replace an existing target
    wave_bytes: int  # maximum number of tensor bytes to hold in memory
    storage_options: Mapping[str, Any] | None  # for a URL
    # Called with the number of tensor bytes written since the last call.
    wrote: Callable[[int], None]

    def write_options(self) -> WriteOptions:
        """Returns the options of a save to the path or URL.

        Raises:
            FileExistsError: the path exists, is not an empty directory, and must not be replaced.
        """
        path = self.path
        if not is_url(path) and not (os.path.isdir(path) and not os.listdir(path)):
            require_absent(path, self.overwrite)
        return WriteOptions(overwrite=self.overwrite, storage_options=self.storage_options)


# The name, the checksums and the items of a file; see _core.WrittenFiles.
_WrittenFile = tuple[str, bytes, list[tuple[int, int, int, int]]]

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


def write_file(target: Output, pieces: Iterator[memoryview], bytes: int) -> list[str]:
    """Writes a file, which appears once it is complete, at the target's path or URL.

    Args:
        pieces: the contents.
        bytes: size of the contents.

    Returns:
        The path.

    Raises:
        FileExistsError: the file exists, and must not be replaced.
        OSError: the file cannot be written.
        DurabilityUncertain: the file is complete, but may be lost in a power cut.
    """
    path = target.path
    if is_url(path):
        folder, name = os.path.split(path)
        store = open_store(folder, target.storage_options)
        if not target.overwrite and store.find(name) is not None:
            raise exists_error(path)
        store.put(name, pieces, bytes)
    else:
        with published_file(path, overwrite=target.overwrite, advice=_ADVICE) as stream:
            for piece in pieces:
                stream.write(piece)
    return [path]


def _sizes(tensors: Mapping[str, Entry]) -> Iterator[tuple[str, int]]:
    return ((name, entry.nbytes) for name, entry in tensors.items())


def _plan(source: Input) -> tuple[AgreedPlan, list[str]]:
    """Plans a save of all values by one rank.

    Returns:
        The plan, and the names in the order of the plan's items.
    """
    state = _C.FlatState({}, local_chunks)
    objects = set(source.objects)
    for name, path in source.paths.items():
        value: torch.Tensor | None = None
        if (entry := source.tensors.get(name)) is not None:
            value = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        elif name not in objects:
            continue
        # The plan has the path as the lengths of the parts of the name.
        is_spelled = ".".join(map(str, path)) == name
        state.add(name, path if is_spelled else (name,), value)
    plan = AgreedPlan()
    structure = state.contents(hash_layout)
    [reply] = plan.coordinator.assign([plan.own.message(structure, None)])
    plan.own.accept(structure, reply)
    return plan, [state.name(item) for item in array("I", plan.own.items)]


# --- safetensors ---------------------------------------------------------------------------------


def require_safetensors(source: Input) -> None:
    """Raises CheckpointError if safetensors cannot hold a tensor's dtype, shape or name."""
    for name, entry in source.tensors.items():
        _core.require_safe(name, _dtype_name(entry), entry.shape)


def _dtype_name(entry: Entry) -> str:
    return str(entry.dtype).removeprefix("torch.")


def _metadata(source: Input) -> dict[str, str]:
    return source.metadata or {"format": "pt"}


def write_safetensors(source: Input, target: Output) -> list[str]:
    """Writes one file and returns its path."""
    return write_file(target, *_safetensors_file(source, source.tensors, target, _FILE_ALIGNMENT))


def write_model(
    source: Input,
    target: Output,
    *,
    max_shard_size: int,
    config: str | None,
    dtype: torch.dtype | None,
) -> list[str]:
    """Writes files of at most ``max_shard_size`` bytes of tensors, or with a single larger tensor,
    an index, the configuration and the checksums of all of them, as a save does. Returns the paths.
    """
    form = Safetensors(
        max_shard_size=max_shard_size, dtype=dtype, config=config, metadata=_metadata(source)
    )
    model = model_target(target.path, form, target.write_options())
    plan, _names = _plan(source)
    with ExitStack() as stack:
        stack.callback(model.discard)
        opened = model.open(0, 1)
        model.lay_out(plan, [opened])
        layout = model.layout
        assert layout is not None
        files: dict[str, dict[str, Entry]] = {name: {} for name, _bytes in layout.files()}
        # A single file may have no index.
        file_of = json.loads(layout.index)["weight_map"] if layout.index else {}
        first = next(iter(files))
        for name, entry in source.tensors.items():
            files[file_of.get(name, first)][name] = entry
        written: list[_WrittenFile] = []
        for name, tensors in files.items():
            sums = PartSums()
            file = _safetensors_file(source, tensors, target, _MODEL_ALIGNMENT, sums.add)
            model.write_file(name, *file)
            written.append((name, sums.encode(), []))
        names = model.file_names()
        if not is_url(target.path):
            stack.enter_context(add_durability_advice(target.path, _ADVICE))
        model.commit(plan, [Written(_core.WrittenFiles(written), opened.directory)])
    return [os.path.join(target.path, name) for name in names]


def _safetensors_file(
    source: Input,
    tensors: Mapping[str, Entry],
    target: Output,
    alignment: int,
    on_tensor: Callable[[int, torch.Tensor], None] = lambda _begin, _data: None,
) -> tuple[Iterator[memoryview], int]:
    """Lays out a file.

    Args:
        alignment: the data begins at a multiple of this number.
        on_tensor: called with the offset of each tensor in the file, and its bytes.

    Returns:
        The contents and their size.

    Raises:
        CheckpointError: the header would be larger than readers accept.
    """
    # Store wide elements first, so that readers can map each tensor at its element alignment.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    specs = [(name, _dtype_name(tensors[name]), tensors[name].shape) for name in order]
    header = _core.encode_safetensors_header(specs, _metadata(source), alignment)

    def pieces() -> Iterator[memoryview]:
        yield memoryview(header)
        begin = len(header)
        ordered = {name: tensors[name] for name in order}
        for _name, tensor in read_in_waves(source, ordered, target):
            data = as_bytes(tensor)
            on_tensor(begin, data)
            begin += data.numel()
            yield from host_pieces(data)
            target.wrote(data.numel())

    return pieces(), len(header) + sum(entry.nbytes for entry in tensors.values())


# --- checkpoints ---------------------------------------------------------------------------------


def write_dcp(source: Input, target: Output) -> list[str]:
    """Writes a checkpoint, a few tensors at a time, and returns its path."""
    path = target.path
    is_new = not is_url(path) and not os.path.lexists(path)
    options = target.write_options()
    if is_url(path) and not target.overwrite:
        with suppress(FileNotFoundError):
            RemoteFolder(path, target.storage_options).names()
            raise exists_error(path)
    plan, names = _plan(source)
    numbers = {name: number for number, name in enumerate(names)}
    written_to = checkpoint_target(path, options)
    files: list[_WrittenFile] = []
    waves = itertools.count()

    def write(names: list[str], values: list[Any], tag: str) -> None:
        sources = _C.SaveSources()
        for name, value in zip(names, values, strict=True):
            sources.add(name, value)
        directory, prefix = written_to.directory, f"__0_{tag}"
        if isinstance(directory, ObjectFolder):
            prefix += f"{next(waves)}_"
        else:
            prefix = _core.choose_prefix(directory, prefix)
        title = f"save {os.path.basename(path)}"
        written = write_files(
            _C.Save(), directory, prefix, sources, options, title=title, rank=None
        ).files
        items = defaultdict(list)
        for name, (file, offset, length, crc) in zip(names, written.locations(), strict=True):
            items[file].append((numbers[name], offset, length, crc))
        files.extend((file, table, items[file]) for file, table in written.tables.items())

    try:
        opened = written_to.open(0, 1)
        written_to.lay_out(plan, [opened])
        tag = written_to.tag or ""
        write(source.objects, [pickled(source.read_object(name)) for name in source.objects], tag)
        for wave in in_waves(_sizes(source.tensors), target.wave_bytes):
            write(wave, source.read(wave), tag)
            target.wrote(sum(source.tensors[name].nbytes for name in wave))
        written_to.commit(plan, [Written(_core.WrittenFiles(files), opened.directory)])
    except BaseException:
        # Remove the files of all waves.
        written_to.discard()
        if is_new:
            with suppress(OSError):
                os.rmdir(path)
        raise
    written_to.discard()
    return [path]


# --- checksums ------------------------------------------------------------------------------------


# Limits of the size of a block, and the number of blocks above which a larger size is chosen, as in
# csrc/format/checksum_table.cpp.
_LEAST_BLOCK, _LARGEST_BLOCK, _BLOCKS = 16 << 10, 1 << 20, 1024


class PartSums:
    """The checksums of complete tensors in one file, as the engine sends them to the coordinator of
    a save (csrc/format/part_sums.h)."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def add(self, begin: int, data: torch.Tensor) -> None:
        """Adds a tensor.

        Args:
            begin: offset of the tensor's data in the file.
            data: the bytes of the tensor.
        """
        count = data.numel()
        if count == 0:  # An empty tensor has no checksums.
            return
        block = _LEAST_BLOCK
        while block < _LARGEST_BLOCK and count > block * _BLOCKS:
            block *= 2
        shares = array("I")
        # Each piece but the last consists of complete blocks.
        for piece in host_pieces(data):
            for at in range(0, len(piece), block):
                part = piece[at : at + block]
                # The share of a rank that has the complete block (csrc/format/partial_crc.h).
                shares.append(_core.crc32(part) ^ _crc_of_zeros(len(part)))
        head = struct.pack("<QQQQI", begin, count, count, 0, len(shares))
        self._parts.append(head + shares.tobytes())

    def encode(self) -> bytes:
        """Returns the encoded checksums of the file."""
        body = struct.pack("<I", len(self._parts)) + b"".join(self._parts)
        return body + struct.pack("<I", _core.crc32(body))


@functools.lru_cache(maxsize=64)
def _crc_of_zeros(count: int) -> int:
    return _core.crc32(bytes(count))
