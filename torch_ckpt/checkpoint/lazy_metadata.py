"""Lazy metadata. It is decoded into torch's objects on first access, because that is slow."""

from __future__ import annotations

import copyreg
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata

from torch_ckpt import _core


class LazyContents(NamedTuple):
    """The contents of lazy metadata.

    Attributes:
        decode: decodes the metadata into torch's objects.
        sent: the result of ``__reduce__`` while the metadata is lazy; None to decode the metadata
            and pickle torch's objects.
        known_index: the index of the metadata, if it has been built.
        reader: returns the reader of the checkpoint, or None if it no longer exists.
    """

    decode: Callable[[], Metadata]
    sent: tuple[Callable[..., Metadata], tuple[Any, ...]] | None = None
    known_index: _core.CheckpointIndex | None = None
    reader: Callable[[], Any] = lambda: None


class _LazyMetadata(Metadata):
    """Metadata that has not been decoded yet. The first access decodes it."""

    def __init__(self, lazy_contents: LazyContents) -> None:
        object.__setattr__(self, "lazy_contents", lazy_contents)

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return Metadata
        _decode(self)
        return getattr(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _decode(self)
        setattr(self, name, value)

    def __eq__(self, other: object) -> bool:
        _decode(self)
        return bool(self == other)

    __hash__ = None  # type: ignore[assignment]


def lazy_metadata(lazy_contents: LazyContents) -> Metadata:
    """Creates lazy metadata."""
    return _LazyMetadata(lazy_contents)


def make_lazy(metadata: Metadata, lazy_contents: LazyContents) -> None:
    """Converts a metadata object into lazy metadata."""
    fields = vars(metadata)
    fields.clear()
    fields["lazy_contents"] = lazy_contents
    metadata.__class__ = _LazyMetadata


def lazy_index(metadata: Metadata) -> _core.CheckpointIndex | None:
    """Returns the index of lazy metadata. Returns None once the metadata has been decoded, because
    the caller may have changed it."""
    lazy_contents = _contents_of(metadata)
    return None if lazy_contents is None else lazy_contents.known_index


def lazy_reader(metadata: Metadata) -> Any:
    """Returns the reader of lazy metadata. Returns None if it no longer exists, or once the
    metadata has been decoded."""
    lazy_contents = _contents_of(metadata)
    return None if lazy_contents is None else lazy_contents.reader()


def _contents_of(metadata: Metadata) -> LazyContents | None:
    found: LazyContents | None = object.__getattribute__(metadata, "__dict__").get("lazy_contents")
    return found


def _decode(metadata: Metadata) -> None:
    lazy_contents = _contents_of(metadata)
    if lazy_contents is not None:
        fields = object.__getattribute__(metadata, "__dict__")
        fields.update(vars(lazy_contents.decode()))
        # Remove this last: another thread may decode the metadata at the same time.
        fields.pop("lazy_contents", None)
    object.__setattr__(metadata, "__class__", Metadata)


def _reduce(metadata: Metadata) -> Any:
    lazy_contents = _contents_of(metadata)
    if lazy_contents is not None and lazy_contents.sent is not None:
        return lazy_contents.sent
    _decode(metadata)
    return metadata.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


# Allows lazy metadata to be pickled for other ranks, and to be copied, without decoding it.
copyreg.pickle(_LazyMetadata, _reduce)
