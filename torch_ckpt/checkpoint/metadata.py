"""Reading and writing ``.metadata``.

The file is a pickle of :class:`torch.distributed.checkpoint.metadata.Metadata`, as stock torch
writes it, and in ours a seal behind it. Before Python runs a pickle, the engine walks its program
and refuses all that metadata has no need of, so that a checkpoint cannot run code; writing keeps to
what every supported torch, older ones included, can read.
"""

from __future__ import annotations

import copy
import copyreg
import enum
import io
import os
import pickle
from collections.abc import Mapping, ValuesView
from contextlib import closing
from typing import Any, cast

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torch_ckpt import _core
from torch_ckpt._base.cycle_collector import no_gc
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.index import (
    METADATA_NAME,
    decode_index,
    index_of_program,
    metadata_bytes_in,
    naming_source,
    open_directory,
    require_end,
    roles,
)
from torch_ckpt.checkpoint.undecoded import index_kept
from torch_ckpt.errors import Corrupt, Unsafe

#: The version of DCP's metadata that stock writers state; older torch had no name for it.
DCP_VERSION: str = getattr(filesystem, "CURRENT_DCP_VERSION", "1.0.0")

# Our attribute of the metadata and its version. Builtin types only: every reader of the metadata,
# allow-list or not, loads those.
_OURS = "torch_ckpt"
_OURS_VERSION = 1


class _AllowListUnpickler(pickle.Unpickler):
    # The engine has refused other names already; this is the second line.
    def find_class(self, module_name: str, global_name: str) -> Any:
        if f"{module_name} {global_name}" not in roles():
            raise Unsafe(
                f"the metadata names {module_name}.{global_name}, which is not on the list of what "
                "a checkpoint may contain"
            )
        if (module_name, global_name) == ("builtins", "getattr"):
            return _member
        return super().find_class(module_name, global_name)


def _member(kind: Any, name: Any) -> enum.Enum:
    """What the metadata looks up by getattr."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__):
        raise Unsafe(
            f"the metadata looks up {name!r} in {kind!r}, which is not a member of an enum"
        )
    return kind[name]


def _trusted(data: bytes) -> Any:
    covered = _core.bytes_sealed(data)
    stream = io.BytesIO(data)
    metadata = pickle.Unpickler(stream).load()
    require_end(stream.tell(), data, covered)
    return metadata


def index_of(metadata: Metadata, source: str) -> _core.CheckpointIndex:
    """The same, of metadata that is here as torch's objects.

    Raises:
        Unsafe, Corrupt: see :func:`decode_index`.
    """
    kept = index_kept(metadata)
    if kept is not None:
        return kept
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
        program = _core.MetadataProgram(_pickled(known).getvalue(), roles())
    except Exception as error:
        raise Corrupt(f"it holds values that metadata cannot have: {error} ({source})") from error
    return index_of_program(program, source)


def _paths(paths: dict[Any, object]) -> dict[str, list[object]]:
    """The paths of names, of builtin types. A path of several names stays one."""
    made: dict[int, list[object]] = {}
    for path in paths.values():
        if id(path) not in made:
            made[id(path)] = _parts(path)
    return {str(name): made[id(path)] for name, path in paths.items()}


def _parts(path: object) -> list[object]:
    parts = path.values() if isinstance(path, dict) else path
    if not isinstance(parts, (tuple, list, ValuesView)):
        return []
    # Other keys lead to different containers, and are not indices of lists.
    return [part if type(part) in (str, int, float, bool) else str(part) for part in parts]


def decode_metadata(data: bytes, source: str, *, allow_pickle: bool = False) -> Metadata:
    """Decodes the contents of a ``.metadata`` file.

    Args:
        data, source: see :func:`decode_index`.
        allow_pickle: accept whatever a pickle can name and do; only for checkpoints from trusted
            writers. The seal is compared all the same, and what the metadata says is checked: disks
            are not trusted.

    Raises:
        Unsafe, Corrupt, MemoryError: see :func:`decode_index`.
    """
    if not allow_pickle:
        decode_index(data, source)
        return decode_indexed(data, source)
    _core.fault_point("decode metadata", source)
    with naming_source(source, True):
        metadata = _trusted(data)
    if not isinstance(metadata, Metadata):
        raise Corrupt(f"{source} holds a {type(metadata).__name__}, not a checkpoint's metadata")
    with no_gc():
        index_of(metadata, source)
    return _with_places(metadata)


def decode_indexed(data: bytes, source: str) -> Metadata:
    """The same, of contents of which :func:`decode_index` has made an index."""
    _core.fault_point("decode metadata", source)
    with naming_source(source, False):
        return _with_places(cast(Metadata, _AllowListUnpickler(io.BytesIO(data)).load()))


def _with_places(metadata: Metadata) -> Metadata:
    if metadata.storage_data is None:
        # torch's default, and the same: everything is missing.
        metadata.storage_data = {}
    return metadata


def read_metadata(
    path: str | os.PathLike[str], *, name: str = METADATA_NAME, allow_pickle: bool = False
) -> Metadata:
    """Reads the metadata of the checkpoint in directory ``path``; stock torch's as well as ours.

    Raises:
        FileNotFoundError: there is no committed checkpoint.
        Unsafe, Corrupt: see :func:`decode_metadata`.
        CheckpointError: the file is larger than ``MAX_METADATA_BYTES``.
    """
    with closing(open_directory(path)) as directory:
        return read_metadata_in(directory, name, allow_pickle=allow_pickle)


def read_metadata_in(
    directory: OpenDirectory, name: str = METADATA_NAME, *, allow_pickle: bool = False
) -> Metadata:
    """The same, of a directory that is open: what is read beneath it belongs together."""
    data = metadata_bytes_in(directory, name)
    return decode_metadata(data, os.path.join(directory.path, name), allow_pickle=allow_pickle)


def with_checksum_tables(metadata: Metadata, tables: Mapping[str, bytes]) -> Metadata:
    """A shallow copy that holds the checksum tables of the files that it names, and no others.

    A copy, since torch keeps the original for the next save where plans are cached, which need not
    be a save of ours; it would then tell of other bytes.

    Args:
        tables: encoded, by the files' paths relative to the checkpoint.
    """
    metadata = copy.copy(metadata)
    vars(metadata).pop(_OURS, None)
    if tables:
        setattr(metadata, _OURS, {"version": _OURS_VERSION, "checksums": dict(tables)})
    return metadata


def checksum_tables(metadata: Metadata | None) -> dict[str, bytes]:
    """The encoded checksum tables by relative path; none where there are none that we know."""
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
    """What our metadata keeps of a tensor's properties."""
    # torch 2.15 added strides as a sixth field, which older versions refuse to unpack and nothing
    # reads; the first five are what every version knows.
    state: tuple[Any, ...] = properties.__getstate__()[:5]  # type: ignore[no-untyped-call]
    return state


def _reduce_properties(properties: TensorProperties) -> tuple[Any, ...]:
    state = stored_properties(properties)
    return copyreg.__newobj__, (TensorProperties,), state  # type: ignore[attr-defined]


def _reduce_member(member: enum.Enum) -> tuple[Any, ...]:
    # As nearly all versions of Python do it; the others by getattr, which readers may refuse.
    return type(member), (member.value,)


def _share_equal_parts(metadata: Metadata) -> None:
    """Lets equal properties, chunks and sizes be one object each, which a pickle holds only once.

    Most tensors of a model share a handful of shapes; it makes the file a third smaller and reading
    and writing it faster, for stock torch too. All parts that become shared are immutable.
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
    """The bytes of a ``.metadata`` file, readable by every torch from 2.6 on."""
    _share_equal_parts(metadata)
    return sealed(_pickled(metadata).getvalue())


def sealed(pickled: bytes) -> bytes:
    """A pickle with the seal behind it."""
    return pickled + _core.seal_of(pickled)
