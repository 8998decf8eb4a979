"""Reads and writes ``.metadata`` files.

The file is a pickle of :class:`torch.distributed.checkpoint.metadata.Metadata`, as in stock torch.
If torch_ckpt wrote the file, a checksum seal follows the pickle. Before Python executes the pickle,
the engine interprets its opcodes and refuses everything that metadata does not need, so that a
checkpoint cannot run code. All supported versions of torch, and older ones, can read the files.
"""

from __future__ import annotations

import copy
import copyreg
import enum
import io
import pickle
from collections.abc import Mapping, ValuesView
from typing import Any, cast

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torch_ckpt import _core
from torch_ckpt._base.cycle_collector import no_gc
from torch_ckpt.checkpoint.index import allow_torchs_dtypes, decode_index
from torch_ckpt.errors import CheckpointError, Corrupt, Unsafe

#: Metadata version that stock torch writes. Older versions of torch do not define the constant.
DCP_VERSION: str = getattr(filesystem, "CURRENT_DCP_VERSION", "1.0.0")

# The attribute that torch_ckpt adds to metadata, and the version of its layout. Its value consists
# of builtin types, which every reader of metadata loads, with or without an allow-list.
_OURS = "torch_ckpt"
_OURS_VERSION = 1

allow_torchs_dtypes()


class _AllowListUnpickler(pickle.Unpickler):
    # A second check: the engine has already checked the pickle.
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._allowed = _core.allowed_globals()

    def find_class(self, module_name: str, global_name: str) -> Any:
        if f"{module_name} {global_name}" not in self._allowed:
            raise Unsafe(
                f"the metadata names {module_name}.{global_name}, which is not on the allow-list "
                "for metadata"
            )
        if (module_name, global_name) == ("builtins", "getattr"):
            return _member
        return super().find_class(module_name, global_name)


def _member(kind: Any, name: Any) -> enum.Enum:
    """Looks up a member of an enum. Replaces getattr in pickles."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__):
        raise Unsafe(
            f"the metadata looks up the attribute {name!r} of {kind!r}, but only members of enums "
            "may be looked up"
        )
    return kind[name]


def index_of(metadata: Metadata, source: str) -> _core.CheckpointIndex:
    """Builds the index of metadata from torch's objects.

    Raises:
        Unsafe, Corrupt: see :func:`decode_index`.
    """
    paths = getattr(metadata, "planner_data", None)
    meta = getattr(metadata, "storage_meta", None)
    known = Metadata(
        getattr(metadata, "state_dict_metadata", None),  # type: ignore[arg-type]
        _paths(paths) if isinstance(paths, dict) else None,
        getattr(metadata, "storage_data", None),
        StorageMeta() if isinstance(meta, StorageMeta) else meta,
    )
    if hasattr(metadata, _OURS):
        setattr(known, _OURS, getattr(metadata, _OURS))
    try:
        with no_gc():
            pickled = pickle.dumps(known, protocol=4)
    except Exception as error:
        raise Corrupt(f"{source}: the metadata contains unsupported values: {error}") from error
    return _core.decode_objects(pickled, source)


def _paths(paths: dict[Any, object]) -> dict[str, list[object]]:
    """Converts the path of each name to builtin types. Names that shared a path object still do."""
    made: dict[int, list[object]] = {}
    for path in paths.values():
        if id(path) not in made:
            made[id(path)] = _parts(path)
    return {str(name): made[id(path)] for name, path in paths.items()}


def _parts(path: object) -> list[object]:
    parts = path.values() if isinstance(path, dict) else path
    if not isinstance(parts, (tuple, list, ValuesView)):
        return []
    # A key of any other type can only belong to a dict, so its text suffices.
    return [part if type(part) in (str, int, float, bool) else str(part) for part in parts]


def decode_metadata(data: bytes, source: str, *, allow_pickle: bool = False) -> Metadata:
    """Decodes the contents of a ``.metadata`` file.

    Args:
        data, source: see :func:`decode_index`.
        allow_pickle: execute any pickle; only for checkpoints from trusted writers. The seal and
            the consistency of the metadata are still checked, because the file may be damaged.

    Raises:
        Unsafe, Corrupt, MemoryError: see :func:`decode_index`.
    """
    if not allow_pickle:
        decode_index(data, source)
        return decode_indexed(data, source)
    _core.fault_point("decode metadata", source)
    try:
        with no_gc():
            covered = _core.bytes_sealed(data)
            stream = io.BytesIO(data)
            metadata = pickle.Unpickler(stream).load()
        if stream.tell() != (len(data) if covered is None else covered):
            raise Corrupt(
                f"the pickle ends at byte {stream.tell()} but is not followed by a valid checksum "
                "seal"
            )
    except Exception as error:
        # A damaged pickle may allocate any amount of memory, so this includes MemoryError.
        raise _damaged(source, error) from error
    if not isinstance(metadata, Metadata):
        raise Corrupt(
            f"{source} contains a {type(metadata).__name__} instead of a checkpoint's metadata"
        )
    index_of(metadata, source)
    return _with_places(metadata)


def decode_indexed(data: bytes, source: str) -> Metadata:
    """Decodes a ``.metadata`` file that :func:`decode_index` has accepted."""
    _core.fault_point("decode metadata", source)
    try:
        with no_gc():
            metadata = _AllowListUnpickler(io.BytesIO(data)).load()
    except (MemoryError, Unsafe):
        # The checked pickle needs little memory, so the process itself is out of memory.
        raise
    except Exception as error:
        raise _damaged(source, error) from error
    return _with_places(cast(Metadata, metadata))


def metadata_of(index: _core.CheckpointIndex) -> Metadata:
    """Converts the index of safetensors files to torch's objects."""
    metadata = Metadata({}, planner_data={}, storage_data={})
    for name in index.names():
        tensor, shards = index.tensor(name), index.shards(name)
        assert tensor is not None
        chunks = [ChunkStorageMetadata(torch.Size(s[0]), torch.Size(s[1])) for s in shards]
        metadata.state_dict_metadata[name] = TensorStorageMetadata(
            TensorProperties(dtype=getattr(torch, tensor[0])), torch.Size(tensor[1]), chunks
        )
        metadata.planner_data[name] = (name,)
        for number, (chunk, (_o, _s, file, offset, length, _t)) in enumerate(
            zip(chunks, shards, strict=True)
        ):
            assert file is not None
            location = filesystem._StorageInfo(file, offset, length)
            metadata.storage_data[MetadataIndex(name, chunk.offsets, number)] = location
    return metadata


def _damaged(source: str, error: Exception) -> Corrupt:
    text = str(error) or type(error).__name__
    return Corrupt(f"{source} is damaged or not a checkpoint's metadata: {text}")


def _with_places(metadata: Metadata) -> Metadata:
    if metadata.storage_data is None:
        # torch's default. It means that nothing is stored.
        metadata.storage_data = {}
    return metadata


def with_checksum_tables(metadata: Metadata, tables: Mapping[str, bytes]) -> Metadata:
    """Returns a shallow copy of the metadata, with the checksum tables of its files added.

    A copy, because torch reuses the original for the next save if plans are cached. Stock torch may
    write that save, and the old tables would not match its bytes.

    Args:
        tables: encoded tables by file path, relative to the checkpoint directory.
    """
    metadata = copy.copy(metadata)
    vars(metadata).pop(_OURS, None)
    if tables:
        setattr(metadata, _OURS, {"version": _OURS_VERSION, "checksums": dict(tables)})
    return metadata


def checksum_tables(metadata: Metadata | None) -> dict[str, bytes]:
    """Returns the encoded checksum tables by relative file path. Empty if the metadata has no
    tables, or tables of an unknown version."""
    ours = getattr(metadata, _OURS, None)
    if not isinstance(ours, dict) or ours.get("version") != _OURS_VERSION:
        return {}
    tables = ours.get("checksums")
    if not isinstance(tables, dict):
        return {}
    if not all(isinstance(p, str) and isinstance(t, bytes) for p, t in tables.items()):
        return {}
    return dict(tables)


def stored_properties(properties: TensorProperties) -> tuple[Any, ...]:
    """Returns the properties of a tensor in the form in which torch_ckpt stores them."""
    # Only the first five fields, which all versions know. torch 2.15 added a sixth, the strides.
    # Older versions fail to unpack it, and no code reads it.
    state: tuple[Any, ...] = properties.__getstate__()[:5]  # type: ignore[no-untyped-call]
    return state


def _reduce_properties(properties: TensorProperties) -> tuple[Any, ...]:
    state = stored_properties(properties)
    return copyreg.__newobj__, (TensorProperties,), state  # type: ignore[attr-defined]


def _reduce_member(member: enum.Enum) -> tuple[Any, ...]:
    # As nearly all versions of Python do. The others use getattr, which readers may refuse.
    return type(member), (member.value,)


def _share_equal_parts(metadata: Metadata) -> None:
    """Replaces equal properties, chunks and sizes with shared objects, which a pickle stores once.

    Most tensors of a model have one of a few shapes, so this makes the file a third smaller and
    faster to read and write, also for stock torch. The shared objects are immutable.
    """
    properties: dict[Any, TensorProperties] = {}
    chunks: dict[Any, ChunkStorageMetadata] = {}
    sizes: dict[torch.Size, torch.Size] = {}
    for stored in metadata.state_dict_metadata.values():
        if not isinstance(stored, TensorStorageMetadata):
            continue
        own = stored.properties
        key = (own.dtype, own.layout, own.requires_grad, own.memory_format, own.pin_memory)
        stored.properties = properties.setdefault((key, getattr(own, "strides", None)), own)
        stored.size = sizes.setdefault(stored.size, stored.size)
        stored.chunks = [chunks.setdefault((c.offsets, c.sizes), c) for c in stored.chunks]


def _pickled(metadata: Metadata) -> io.BytesIO:
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol=4)
    pickler.dispatch_table = copyreg.dispatch_table | {
        TensorProperties: _reduce_properties,
        _MEM_FORMAT_ENCODING: _reduce_member,
    }
    with no_gc():
        pickler.dump(metadata)
    return stream


def encode_metadata(metadata: Metadata) -> bytes:
    """Returns the contents of a ``.metadata`` file, readable by torch 2.6 and later."""
    _share_equal_parts(metadata)
    return sealed(_pickled(metadata).getvalue())


def sealed(pickled: bytes) -> bytes:
    """Returns a pickle followed by its seal."""
    return pickled + _core.seal_of(pickled)


def require_readable(data: bytes, path: str) -> None:
    """Raises CheckpointError if metadata that a save has encoded could not be loaded again.

    Args:
        data: the contents of ``.metadata``.
        path: the checkpoint directory.
    """
    try:
        decode_index(data, path)
    except (Corrupt, Unsafe) as error:
        raise CheckpointError(
            f"{path}: this save was not committed, because its metadata could not be loaded again: "
            f"{error}"
        ) from error
