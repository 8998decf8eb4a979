"""Reading and writing ``.metadata``.

The file is a pickle of :class:`torch.distributed.checkpoint.metadata.Metadata`, as stock torch
writes it. Reading goes through an allow-list of exact names, so that a checkpoint cannot run code;
writing keeps to what every supported torch, older ones included, can read.
"""

from __future__ import annotations

import copy
import copyreg
import io
import os
import pickle
import stat
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from torch_ckpt.collector import no_gc
from torch_ckpt.errors import CheckpointError, Corrupt, Unsafe
from torch_ckpt.validation import check_metadata

#: Name of the file whose appearance is the commit of a checkpoint.
METADATA_NAME = ".metadata"

# A pickle's cost is bounded by its size; the metadata of a million tensors has about 200 MB.
MAX_METADATA_BYTES = 4 << 30

# Our attribute of the metadata and its version. Builtin types only: every reader of the metadata,
# allow-list or not, loads those.
_OURS = "torch_ckpt"
_OURS_VERSION = 1

_DCP = "torch.distributed.checkpoint"
_SHARD = "torch.distributed._shard"

_ALLOWED: dict[str, frozenset[str]] = {
    "pathlib": frozenset({"Path", "PosixPath", "PurePosixPath"}),
    "pathlib._local": frozenset({"Path", "PosixPath", "PurePosixPath"}),
    "collections": frozenset({"OrderedDict"}),
    "torch": frozenset(
        {"Size"} | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    ),
    "torch.serialization": frozenset({"_get_layout"}),
    f"{_DCP}.metadata": frozenset(
        {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        }
    ),
    f"{_DCP}.filesystem": frozenset({"_StorageInfo", "_StoragePrefix"}),
    # The plans that Megatron keeps beside the metadata (`all_local_plans`).
    f"{_DCP}.planner": frozenset(
        {"BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"}
    ),
    # ShardedTensor checkpoints of older torch.
    f"{_SHARD}.metadata": frozenset({"ShardMetadata"}),
    f"{_SHARD}.sharded_tensor.metadata": frozenset(
        {"MEM_FORMAT_ENCODING", "ShardedTensorMetadata", "TensorProperties"}
    ),
}


class _AllowListUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        if global_name not in _ALLOWED.get(module_name, frozenset()):
            raise Unsafe(
                f"the metadata names {module_name}.{global_name}, which is not on the list of what "
                "a checkpoint may contain; pass allow_pickle=True only if you trust its writer"
            )
        return super().find_class(module_name, global_name)


def decode_metadata(data: bytes, source: str, *, allow_pickle: bool = False) -> Metadata:
    """Decodes the contents of a ``.metadata`` file.

    Args:
        data: the file's bytes.
        source: where they come from, for messages.
        allow_pickle: accept whatever a pickle can name; only for checkpoints from trusted writers.

    Raises:
        Unsafe: the pickle names something that is not metadata, or data outside of the
            checkpoint's directory.
        Corrupt: it is not a pickle of ``Metadata``, or what that says cannot be.
    """
    unpickler = pickle.Unpickler if allow_pickle else _AllowListUnpickler
    try:
        with no_gc():
            metadata = unpickler(io.BytesIO(data)).load()
    except Unsafe as error:
        raise Unsafe(f"{source}: {error}") from None
    except Exception as error:
        raise Corrupt(
            f"{source} is damaged or not a checkpoint's metadata: {error or type(error).__name__}"
        ) from error
    if not isinstance(metadata, Metadata):
        raise Corrupt(f"{source} holds a {type(metadata).__name__}, not a checkpoint's metadata")
    # Where the writer is trusted, too: disks are not.
    with no_gc():
        check_metadata(metadata, source)
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
    data = metadata_bytes(path, name)
    return decode_metadata(data, os.path.join(path, name), allow_pickle=allow_pickle)


def metadata_bytes(path: str | os.PathLike[str], name: str = METADATA_NAME) -> bytes:
    """What :func:`read_metadata` decodes.

    Raises:
        FileNotFoundError, Corrupt, CheckpointError: see :func:`read_metadata`.
    """
    file = os.path.join(path, name)
    try:
        with open(file, "rb", opener=_open_without_waiting) as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise Corrupt(f"{file} is not a regular file")
            size = status.st_size
            if size > MAX_METADATA_BYTES:
                raise CheckpointError(f"{file} has {size} bytes, more than {MAX_METADATA_BYTES}")
            return stream.read()
    except FileNotFoundError:
        raise FileNotFoundError(
            2, f"no committed checkpoint: there is no {name} in the directory", os.fspath(path)
        ) from None


def _open_without_waiting(path: str, flags: int) -> int:
    # A FIFO in the place of the metadata cannot hang the load before it is refused.
    return os.open(path, flags | os.O_NONBLOCK)


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


def _reduce_properties(properties: TensorProperties) -> tuple[Any, ...]:
    # torch 2.15 added strides as a sixth field, which older versions refuse to unpack and nothing
    # reads; the first five are what every version knows.
    state = properties.__getstate__()[:5]  # type: ignore[no-untyped-call]
    return copyreg.__newobj__, (TensorProperties,), state  # type: ignore[attr-defined]


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


def encode_metadata(metadata: Metadata) -> bytes:
    """The bytes of a ``.metadata`` file, readable by every torch from 2.6 on."""
    _share_equal_parts(metadata)
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol=4)
    pickler.dispatch_table = copyreg.dispatch_table | {TensorProperties: _reduce_properties}
    with no_gc():
        pickler.dump(metadata)
    return stream.getvalue()
