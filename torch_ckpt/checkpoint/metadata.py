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
import errno
import io
import os
import pickle
import stat
from collections.abc import Iterator, Mapping, ValuesView
from contextlib import closing, contextmanager, suppress
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
from torch_ckpt.checkpoint.undecoded import index_kept
from torch_ckpt.errors import CheckpointError, Corrupt, Unsafe

#: Name of the file whose appearance is the commit of a checkpoint.
METADATA_NAME = ".metadata"

#: The version of DCP's metadata that stock writers state; older torch had no name for it.
DCP_VERSION: str = getattr(filesystem, "CURRENT_DCP_VERSION", "1.0.0")

# A pickle's cost is bounded by its size; the metadata of a million tensors has about 200 MB.
MAX_METADATA_BYTES = 4 << 30

# Our attribute of the metadata and its version. Builtin types only: every reader of the metadata,
# allow-list or not, loads those.
_OURS = "torch_ckpt"
_OURS_VERSION = 1

_DCP = "torch.distributed.checkpoint"
_SHARD = "torch.distributed._shard"

# What metadata may name, and what its program may do with each: the roles of
# csrc/index/metadata_pickle.h, which walks the program before Python runs it.
_NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    # Only to look up a member of an enum: so pickle Python 3.11.0 to 3.11.3.
    "builtins": {"member": ("getattr",)},
    "pathlib": {"function": ("Path", "PosixPath", "PurePosixPath")},
    "pathlib._local": {"function": ("Path", "PosixPath", "PurePosixPath")},
    "collections": {"mapping": ("OrderedDict",)},
    "torch": {
        "function": ("Size",),
        "value": tuple(n for n, value in vars(torch).items() if isinstance(value, torch.dtype)),
    },
    "torch.serialization": {"function": ("_get_layout",)},
    f"{_DCP}.metadata": {
        "dict_class": (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "StorageMeta",
            "TensorStorageMetadata",
        ),
        "key_class": ("MetadataIndex",),
        "tuple_class": ("TensorProperties",),
        "enumeration": ("_MEM_FORMAT_ENCODING",),
    },
    f"{_DCP}.filesystem": {"dict_class": ("_StorageInfo", "_StoragePrefix")},
    # The plans that Megatron keeps beside the metadata (`all_local_plans`).
    f"{_DCP}.planner": {
        "dict_class": ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem"),
        "enumeration": ("WriteItemType",),
    },
    # ShardedTensor checkpoints of older torch.
    f"{_SHARD}.metadata": {"slots_class": ("ShardMetadata",)},
    f"{_SHARD}.sharded_tensor.metadata": {
        "dict_class": ("ShardedTensorMetadata",),
        "tuple_class": ("TensorProperties",),
        "enumeration": ("MEM_FORMAT_ENCODING",),
    },
}
#: The same by "module name", as the engine takes it.
ROLES: dict[str, str] = {
    f"{module} {name}": role
    for module, roles in _NAMES.items()
    for role, names in roles.items()
    for name in names
}


class _AllowListUnpickler(pickle.Unpickler):
    # The engine has refused other names already; this is the second line.
    def find_class(self, module_name: str, global_name: str) -> Any:
        if f"{module_name} {global_name}" not in ROLES:
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
            f"the metadata looks up {name!r} of {kind!r}, which is not a member of an enum"
        )
    return kind[name]


def _require_end(end: int, data: bytes, covered: int | None) -> None:
    if end != (len(data) if covered is None else covered):
        raise Corrupt(f"the pickle ends at byte {end}, and no intact seal follows")


def _trusted(data: bytes) -> Any:
    covered = _core.bytes_sealed(data)
    stream = io.BytesIO(data)
    metadata = pickle.Unpickler(stream).load()
    _require_end(stream.tell(), data, covered)
    return metadata


def _harmless(data: bytes) -> _core.MetadataProgram:
    covered = _core.bytes_sealed(data)
    program = _core.MetadataProgram(data, ROLES)
    _require_end(program.end, data, covered)
    return program


@contextmanager
def _told_of(source: str, allow_pickle: bool) -> Iterator[None]:
    """Makes of whatever fails an error that says where the bytes come from."""
    try:
        with no_gc():
            yield
    except Unsafe as error:
        raise Unsafe(
            f"{source}: {error}; pass allow_pickle=True (to a CheckpointManager: "
            "load_options={'allow_pickle': True}) only if you trust its writer"
        ) from None
    except Exception as error:
        # What has been checked asks for little; a trusted pickle that is damaged may ask for all.
        if isinstance(error, MemoryError) and not allow_pickle:
            raise
        raise Corrupt(
            f"{source} is damaged or not a checkpoint's metadata: {error or type(error).__name__}"
        ) from error


def _index(program: _core.MetadataProgram, source: str) -> _core.CheckpointIndex:
    try:
        return program.index()
    except (Corrupt, Unsafe) as error:
        raise type(error)(f"{error} ({source})") from None


def decode_index(data: bytes, source: str) -> _core.CheckpointIndex:
    """What the contents of a ``.metadata`` file say, without torch's objects.

    Args:
        data: the file's bytes. Ours end in a seal; those of stock torch, where the pickle ends.
        source: where they come from, for messages.

    Raises:
        Unsafe: the pickle names something that is not metadata, or data outside of the
            checkpoint's directory.
        Corrupt: it is not a pickle of ``Metadata``, does what metadata's never do, is damaged, or
            what it says cannot be.
        MemoryError: the process has no memory for it, which says nothing about the bytes.
    """
    with _told_of(source, False):
        program = _harmless(data)
    return _index(program, source)


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
        program = _core.MetadataProgram(_pickled(known).getvalue(), ROLES)
    except Exception as error:
        raise Corrupt(f"it holds what is not metadata: {error} ({source})") from error
    return _index(program, source)


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
    with _told_of(source, True):
        metadata = _trusted(data)
    if not isinstance(metadata, Metadata):
        raise Corrupt(f"{source} holds a {type(metadata).__name__}, not a checkpoint's metadata")
    with no_gc():
        index_of(metadata, source)
    return _with_places(metadata)


def decode_indexed(data: bytes, source: str) -> Metadata:
    """The same, of contents of which :func:`decode_index` has made an index."""
    _core.fault_point("decode metadata", source)
    with _told_of(source, False):
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


def read_index_in(directory: OpenDirectory, name: str = METADATA_NAME) -> _core.CheckpointIndex:
    """What the metadata in an open directory says, without torch's objects.

    Raises:
        FileNotFoundError, Unsafe, Corrupt, CheckpointError: see :func:`read_metadata`.
    """
    return decode_index(metadata_bytes_in(directory, name), os.path.join(directory.path, name))


def open_directory(path: str | os.PathLike[str]) -> OpenDirectory:
    """Opens the directory of a checkpoint, which the path leads to as it is.

    Raises:
        FileNotFoundError: there is no such directory, and so no committed checkpoint.
        OSError: it may not be opened.
    """
    try:
        return OpenDirectory(path)
    except FileNotFoundError:
        raise no_checkpoint(path, "such directory") from None


def metadata_bytes_in(directory: OpenDirectory, name: str = METADATA_NAME) -> bytes:
    """What :func:`read_metadata_in` decodes.

    Raises:
        FileNotFoundError, Corrupt, CheckpointError: see :func:`read_metadata`.
        Unsafe: a link is in its place.
    """
    file = os.path.join(directory.path, name)
    try:
        stream = open(name, "rb", opener=directory.open_for_read)  # noqa: SIM115
    except FileNotFoundError:
        raise no_checkpoint(directory.path, f"{name} in the directory") from None
    except ValueError:
        if stat.S_ISDIR(os.stat(name, dir_fd=directory.fd).st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), file) from None
        raise Corrupt(f"{file} is not a regular file") from None
    try:
        size = os.fstat(stream.fileno()).st_size
        if size > MAX_METADATA_BYTES:
            raise CheckpointError(f"{file} has {size} bytes, more than {MAX_METADATA_BYTES}")
        return stream.read(size)
    finally:
        # All that was wanted has been read by then.
        with suppress(OSError):
            stream.close()


def no_checkpoint(path: str | os.PathLike[str], lacking: str) -> FileNotFoundError:
    """Makes the error for a path without a committed checkpoint."""
    return FileNotFoundError(
        errno.ENOENT, f"no committed checkpoint: there is no {lacking}", os.fspath(path)
    )


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
