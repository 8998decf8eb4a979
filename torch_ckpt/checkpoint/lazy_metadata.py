"""Lazy metadata. It is decoded into torch's objects on first access, because that is slow."""

from __future__ import annotations

import copyreg
import pickle
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata

from torch_ckpt import _core
from torch_ckpt._base.paths import is_url
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.index import metadata_bytes_in
from torch_ckpt.checkpoint.metadata import decode_metadata
from torch_ckpt.errors import CheckpointError

#: Maximum total size, in bytes, of the metadata that the coordinator sends to all other ranks.
MOST_BYTES_SENT = 16 << 20


@dataclass(frozen=True)
class LazyContents:
    """The contents of lazy metadata.

    Attributes:
        decode: decodes the metadata into torch's objects.
        sent: the result of ``__reduce__`` while the metadata is lazy; None to decode the metadata
            and pickle torch's objects.
        index: the index of the metadata, if it has been built.
        reader: returns the reader of the checkpoint, or None if it no longer exists.
    """

    decode: Callable[[], Metadata]
    sent: tuple[Callable[..., Metadata], tuple[Any, ...]] | None = None
    index: _core.CheckpointIndex | None = None
    reader: Callable[[], Any] = lambda: None


class LazyMetadata(Metadata):
    """Metadata that the first access to an attribute decodes. It pretends to be of torch's class,
    also to pickle and in comparisons.

    Args:
        contents: the lazy contents; None for metadata with no entries, which can become lazy later.
    """

    __slots__ = ("_lazy",)
    _lazy: LazyContents | None

    def __init__(self, contents: LazyContents | None = None) -> None:
        object.__setattr__(self, "_lazy", contents)
        if contents is None:
            super().__init__({})

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return Metadata
        _decode(self)
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _decode(self)
        object.__setattr__(self, name, value)


def make_lazy(metadata: Metadata, contents: LazyContents) -> None:
    """Replaces all attributes by lazy contents. Decodes them at once if the metadata is a copy that
    a planner has made, which cannot be lazy."""
    vars(metadata).clear()
    if type(metadata) is LazyMetadata:
        object.__setattr__(metadata, "_lazy", contents)
    else:
        vars(metadata).update(vars(contents.decode()))


def lazy_contents(metadata: Metadata | None) -> LazyContents | None:
    """Returns the contents of lazy metadata. Returns None once the metadata has been decoded,
    because the caller may have changed it."""
    if type(metadata) is not LazyMetadata:
        return None
    found: LazyContents | None = object.__getattribute__(metadata, "_lazy")
    return found


def _decode(metadata: LazyMetadata) -> None:
    contents = lazy_contents(metadata)
    if contents is not None:
        object.__getattribute__(metadata, "__dict__").update(vars(contents.decode()))
        # Do this last: another thread may decode the metadata at the same time.
        object.__setattr__(metadata, "_lazy", None)


def _reduce(metadata: LazyMetadata) -> Any:
    contents = lazy_contents(metadata)
    if contents is not None and contents.sent is not None:
        return contents.sent
    decoded = Metadata.__new__(Metadata)
    vars(decoded).update(vars(metadata))
    return decoded.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


# Allows lazy metadata to be pickled for other ranks, and to be copied, without decoding it.
copyreg.pickle(LazyMetadata, _reduce)


def saved_contents(data: _core.EncodedMetadata) -> LazyContents:
    """Returns the lazy contents of a ``.metadata`` file that a save has just written."""

    def decode() -> Metadata:
        return decode_metadata(bytes(data), "the metadata of this save")

    return LazyContents(decode, sent=(_saved, (data,)))


def _saved(data: _core.EncodedMetadata) -> Metadata:
    return LazyMetadata(saved_contents(data))


class SavedMetadata(NamedTuple):
    """The metadata of a committed save, in the form in which the coordinator sends it.

    If the metadata is large, other ranks receive only its seal. They read the metadata from the
    directory on first access.

    Attributes:
        data: the contents of ``.metadata``; None if the rank must read the file.
        path: the checkpoint directory or URL.
        ranks: number of ranks in the save.
        seal: the checksum seal of the contents, if ``data`` is None.
    """

    data: _core.EncodedMetadata | None
    path: str
    ranks: int
    seal: bytes = b""

    def __reduce__(self) -> Any:
        data, path, ranks, seal = self
        # _read() reads local directories only.
        if data is not None and len(data) * ranks > MOST_BYTES_SENT and not is_url(path):
            seal, data = data.seal, None
        return SavedMetadata, (data, path, ranks, seal)

    def metadata(self) -> Metadata:
        """Returns lazy metadata.

        If this rank must read the metadata file, the first access raises CheckpointError if another
        save has replaced the file.
        """
        if self.data is not None:
            return _saved(self.data)
        return LazyMetadata(LazyContents(partial(_read, self.path, self.seal)))


def _read(path: str, seal: bytes) -> Metadata:
    try:
        with closing(OpenDirectory(path)) as directory:
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
