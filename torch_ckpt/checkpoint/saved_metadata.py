"""The metadata of a committed save, in the form in which its ranks receive it."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from torch_ckpt import _core
from torch_ckpt._base.paths import is_url
from torch_ckpt.checkpoint.index import metadata_bytes_in, open_directory
from torch_ckpt.checkpoint.lazy_metadata import LazyContents, lazy_metadata, make_lazy
from torch_ckpt.checkpoint.metadata import decode_metadata
from torch_ckpt.errors import CheckpointError

#: Maximum total size, in bytes, of the metadata that the coordinator sends to all other ranks.
MOST_BYTES_SENT = 16 << 20


def lazy_metadata_of(data: bytes) -> Metadata:
    """Returns lazy metadata, which decodes the contents of a ``.metadata`` file on first access."""
    return lazy_metadata(_of_saved(data))


def make_lazy_from(metadata: Metadata, data: bytes) -> None:
    """Converts a metadata object into lazy metadata for the contents of a ``.metadata`` file."""
    make_lazy(metadata, _of_saved(data))


class SavedMetadata:
    """Metadata that the coordinator of a save has committed.

    If the metadata is large, other ranks receive only its seal. They read the metadata from the
    directory on first access.

    Args:
        data: the contents of ``.metadata``; None if this rank must read the file.
        path: the checkpoint directory or URL.
        ranks: number of ranks in the save.
        seal: the checksum seal of the contents, if ``data`` is None.
    """

    def __init__(self, data: bytes | None, path: str, ranks: int, seal: bytes = b"") -> None:
        self._data = data
        self._path = path
        self._ranks = ranks
        self._seal = seal

    def __reduce__(self) -> Any:
        data, seal = self._data, self._seal
        # _read() reads local directories only.
        if (
            data is not None
            and len(data) * self._ranks > MOST_BYTES_SENT
            and not is_url(self._path)
        ):
            seal, data = data[-_core.SEAL_BYTES :], None
        return SavedMetadata, (data, self._path, self._ranks, seal)

    def metadata(self) -> Metadata:
        """Returns lazy metadata.

        If this rank must read the metadata file, the first access raises CheckpointError if another
        save has replaced the file.
        """
        if self._data is not None:
            return lazy_metadata_of(self._data)
        return lazy_metadata(LazyContents(partial(_read, self._path, self._seal)))


def _read(path: str, seal: bytes) -> Metadata:
    try:
        with closing(open_directory(path)) as directory:
            data = metadata_bytes_in(directory)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"the metadata of the save to {path} no longer exists ({error}); access it before the "
            "checkpoint is deleted or moved, or on rank 0, which keeps it in memory"
        ) from error
    if not data.endswith(seal):
        raise CheckpointError(
            f"{path}: another save has replaced the metadata of this save; access it before the "
            "next save, or on rank 0, which keeps it in memory"
        )
    return decode_metadata(data, path)


def _of_saved(data: bytes) -> LazyContents:
    decode = partial(decode_metadata, data, "the metadata of this save")
    return LazyContents(decode, sent=(lazy_metadata_of, (data,)))
