"""Builds the index of a checkpoint's metadata without torch.

The metadata file is a pickle (checkpoint/metadata.py). Python does not execute the pickle. The
engine interprets its opcodes, and refuses everything that metadata does not need.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from torch_ckpt import _core
from torch_ckpt._base.cycle_collector import no_gc
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.errors import CheckpointError, Corrupt, Unsafe

#: Name of the metadata file. A checkpoint is committed when this file appears.
METADATA_NAME = ".metadata"


# Limits the cost of decoding. The metadata of a million tensors is about 200 MB.
MAX_METADATA_BYTES = 4 << 30


_DCP = "torch.distributed.checkpoint"
_SHARD = "torch.distributed._shard"


# The names that metadata may contain, with the roles that they have for the engine
# (csrc/index/metadata_pickle.h).
_NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    # Only to look up enum members, which Python 3.11.0 to 3.11.3 pickles as calls of getattr.
    "builtins": {"member": ("getattr",)},
    "pathlib": {"function": ("Path", "PosixPath", "PurePosixPath")},
    "pathlib._local": {"function": ("Path", "PosixPath", "PurePosixPath")},
    "collections": {"mapping": ("OrderedDict",)},
    "torch": {"function": ("Size",)},
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
    # Plans, which Megatron stores in the metadata (`all_local_plans`).
    f"{_DCP}.planner": {
        "dict_class": ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem"),
        "enumeration": ("WriteItemType",),
    },
    # ShardedTensors in checkpoints of older torch versions.
    f"{_SHARD}.metadata": {"slots_class": ("ShardMetadata",)},
    f"{_SHARD}.sharded_tensor.metadata": {
        "dict_class": ("ShardedTensorMetadata",),
        "tuple_class": ("TensorProperties",),
        "enumeration": ("MEM_FORMAT_ENCODING",),
    },
}


# The names of torch's dtypes, for a process that has not imported torch.
_DTYPES = frozenset(
    {
        *("bfloat16", "float16", "float32", "float64", "half", "float", "double"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
        *("float4_e2m1fn_x2", "complex32", "complex64", "complex128", "bcomplex32"),
        *("chalf", "cfloat", "cdouble", "bool", "short", "int", "long"),
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (*range(1, 9), 16, 32, 64)),
        *("qint8", "qint32", "quint8", "quint4x2", "quint2x4"),
        *("bit", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    }
)


def roles() -> dict[str, str]:
    """Returns the role of each "module name" that metadata may contain, for the engine.

    The names of dtypes come from torch if it is imported, otherwise from a list in this file.
    """
    return _roles(_is_torch_imported())


def _is_torch_imported() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and not getattr(torch.__spec__, "_initializing", False)


@functools.cache
def _roles(is_torch_imported: bool) -> dict[str, str]:
    found = {
        f"{module} {name}": role
        for module, names_by_role in _NAMES.items()
        for role, names in names_by_role.items()
        for name in names
    }
    dtypes: Iterable[str] = _DTYPES
    if is_torch_imported:
        import torch

        dtypes = (name for name, value in vars(torch).items() if isinstance(value, torch.dtype))
    return found | {f"torch {name}": "value" for name in dtypes}


def require_end(end: int, data: bytes, covered: int | None) -> None:
    if end != (len(data) if covered is None else covered):
        raise Corrupt(f"the pickle ends at byte {end} but is not followed by a valid checksum seal")


@contextmanager
def naming_source(source: str, allow_pickle: bool) -> Iterator[None]:
    """Block that decodes metadata. Adds the source of the bytes to every error in it."""
    try:
        with no_gc():
            yield
    except Unsafe as error:
        raise Unsafe(
            f"{source}: {error}; pass allow_pickle=True (to a CheckpointManager: "
            "load_options={'allow_pickle': True}) only if you trust the writer"
        ) from None
    except Exception as error:
        # A checked pickle needs little memory, so the process itself is out of memory. But with
        # allow_pickle, a damaged pickle may allocate any amount.
        if isinstance(error, MemoryError) and not allow_pickle:
            raise
        raise Corrupt(
            f"{source} is damaged or not a checkpoint's metadata: {error or type(error).__name__}"
        ) from error


def _checked_program(data: bytes) -> _core.MetadataProgram:
    covered = _core.bytes_sealed(data)
    program = _core.MetadataProgram(data, roles())
    require_end(program.end, data, covered)
    return program


def index_of_program(program: _core.MetadataProgram, source: str) -> _core.CheckpointIndex:
    try:
        return program.index()
    except (Corrupt, Unsafe) as error:
        raise type(error)(f"{error} ({source})") from None


def decode_index(data: bytes, source: str) -> _core.CheckpointIndex:
    """Builds the index of a ``.metadata`` file from its contents, without torch's objects.

    Args:
        data: the contents of the file. If torch_ckpt wrote it, a checksum seal follows the pickle.
        source: the origin of the bytes, for messages.

    Raises:
        Unsafe: the pickle names a type or function that metadata must not contain, or a file
            outside the checkpoint directory.
        Corrupt: the bytes are damaged, are not a pickle of ``Metadata``, contain operations that
            metadata never has, or contradict themselves.
        MemoryError: the process is out of memory. The bytes need not be damaged.
    """
    with naming_source(source, False):
        try:
            program = _checked_program(data)
        except Unsafe:
            if _is_torch_imported():
                raise
            # The name may be a dtype of the installed torch that is not listed in this file.
            with suppress(ImportError):
                import torch  # noqa: F401
            program = _checked_program(data)
    return index_of_program(program, source)


def read_index_in(directory: OpenDirectory, name: str = METADATA_NAME) -> _core.CheckpointIndex:
    """Reads the index of the metadata in an open directory, without torch's objects.

    Raises:
        FileNotFoundError, Unsafe, Corrupt, CheckpointError: see :func:`read_metadata`.
    """
    return decode_index(metadata_bytes_in(directory, name), os.path.join(directory.path, name))


def open_directory(path: str | os.PathLike[str]) -> OpenDirectory:
    """Opens the checkpoint directory at exactly this path. Does not resolve roots or step numbers.

    Raises:
        FileNotFoundError: the directory does not exist, so there is no committed checkpoint.
        OSError: the directory cannot be opened.
    """
    try:
        return OpenDirectory(path)
    except FileNotFoundError:
        raise no_checkpoint(path, "such directory") from None


def metadata_bytes_in(directory: OpenDirectory, name: str = METADATA_NAME) -> bytes:
    """Reads the contents of a ``.metadata`` file in an open directory.

    Raises:
        FileNotFoundError, Corrupt, CheckpointError: see :func:`read_metadata`.
        Unsafe: the file is a symbolic link.
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
            raise CheckpointError(
                f"{file} is too large: it has {size} bytes, and the limit is {MAX_METADATA_BYTES}"
            )
        return stream.read(size)
    finally:
        # The contents have been read, so an error from close() does not matter.
        with suppress(OSError):
            stream.close()


def no_checkpoint(path: str | os.PathLike[str], lacking: str) -> FileNotFoundError:
    """Builds the error for a path without a committed checkpoint."""
    return FileNotFoundError(
        errno.ENOENT, f"no committed checkpoint: there is no {lacking}", os.fspath(path)
    )
