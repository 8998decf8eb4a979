"""Builds the index of a checkpoint's metadata, or of safetensors files, without torch.

The metadata file is a pickle (checkpoint/metadata.py). Python does not execute the pickle. The
engine interprets its opcodes, and refuses everything that metadata does not need
(csrc/index/checkpoint_index.h). The headers of safetensors files are JSON, which the engine decodes
(csrc/engine/safetensors_files.h).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

from torch_ckpt import _core
from torch_ckpt._base.formatting import some_of
from torch_ckpt._base.log import warn
from torch_ckpt._base.system import is_url
from torch_ckpt.checkpoint.folders import Folder
from torch_ckpt.errors import Unsafe

T = TypeVar("T")

#: Name of the metadata file. A checkpoint is committed when this file appears.
METADATA_NAME = ".metadata"


#: Limits the cost of decoding.
MAX_METADATA_BYTES = _core.MAX_METADATA_BYTES


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
    return with_known_dtypes(lambda: _core.decode_index(data, source))


#: A shard as ``_core.CheckpointIndex.shards`` returns it.
StoredShard = tuple[tuple[int, ...], tuple[int, ...], str | None, int, int, bool]


def locations_of(shards: Iterable[StoredShard]) -> set[tuple[str, int, int]]:
    """Returns file, offset and length of each record that has shards. Empty shards may share one
    record."""
    return {(file, at, length) for _o, _s, file, at, length, _t in shards if file is not None}


def with_known_dtypes(decode: Callable[[], T]) -> T:
    """Decodes metadata. If that fails because of an unknown name, imports torch, which may have a
    dtype with this name, and decodes the metadata again."""
    try:
        return decode()
    except Unsafe:
        with suppress(ImportError):
            allow_torchs_dtypes()
        return decode()


def allow_torchs_dtypes() -> None:
    """Adds the dtypes of the installed torch to the names that metadata may contain."""
    import torch

    dtypes = [name for name, value in vars(torch).items() if isinstance(value, torch.dtype)]
    _core.allow_dtypes(dtypes)


def read_safetensors(folder: Folder, name: str) -> _core.SafetensorsFiles:
    """Reads the headers of safetensors files in an open folder. Warns if a file has changed since
    its checksums were saved.

    Args:
        name: the name of one file, or of the index of several files.

    Raises:
        Unsafe: a name leads out of the folder, or a file is a symbolic link.
        Corrupt: a file, the index or the checksums are damaged or contradict each other.
        OSError: a file cannot be read.
    """
    with folder.own_errors():
        read = _core.read_safetensors(folder, name)
    stale = [file.name for file in read.files if file.has_stale_checksums]
    if stale:
        warn(
            f"{folder.path}: another program has changed files since torch_ckpt saved their "
            f"checksums, so these files are read without verification: {some_of(stale)}"
        )
    return read


def read_index(folder: Folder, safetensors: str | None) -> _core.CheckpointIndex:
    """Reads the index of a checkpoint in an open folder, without torch's objects.

    Args:
        safetensors: see :class:`torch_ckpt.checkpoint.locating.OpenCheckpoint`.

    Raises:
        FileNotFoundError, CheckpointError, Unsafe, Corrupt, OSError: see :func:`read_index_in` and
            :func:`read_safetensors`.
    """
    if safetensors is None:
        return read_index_in(folder)
    return read_safetensors(folder, safetensors).index


def read_index_in(folder: Folder, name: str = METADATA_NAME) -> _core.CheckpointIndex:
    """Reads the index of the metadata in an open folder, without torch's objects.

    Raises:
        FileNotFoundError, CheckpointError: see :func:`metadata_bytes_in`.
        Unsafe, Corrupt: see :func:`metadata_bytes_in` and :func:`decode_index`.
    """
    return decode_index(metadata_bytes_in(folder, name), os.path.join(folder.path, name))


def metadata_bytes_in(folder: Folder, name: str = METADATA_NAME) -> bytes:
    """Reads the contents of a ``.metadata`` file in an open folder.

    Raises:
        FileNotFoundError: there is no committed checkpoint.
        Corrupt, Unsafe, CheckpointError: see :meth:`torch_ckpt.checkpoint.folders.Folder.read`.
    """
    try:
        return folder.read(name, MAX_METADATA_BYTES)
    except FileNotFoundError:
        where = "beneath this URL" if is_url(folder.path) else "in the directory"
        raise no_checkpoint(folder.path, f"{name} {where}") from None


def no_checkpoint(path: str | os.PathLike[str], lacking: str) -> FileNotFoundError:
    """Builds the error for a path without a committed checkpoint."""
    return FileNotFoundError(
        errno.ENOENT, f"no committed checkpoint: there is no {lacking}", os.fspath(path)
    )
