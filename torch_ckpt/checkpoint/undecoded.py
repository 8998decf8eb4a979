"""Lazy metadata. It is decoded into torch's objects on first access, because that is slow."""

from __future__ import annotations

import copyreg
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata

from torch_ckpt import _core


class NotDecoded(NamedTuple):
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


class _DecodedWhenUsed(Metadata):
    """Metadata that has not been decoded yet. The first access decodes it."""

    def __init__(self, not_decoded: NotDecoded) -> None:
        object.__setattr__(self, "not_decoded", not_decoded)

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


def undecoded(not_decoded: NotDecoded) -> Metadata:
    """Creates lazy metadata."""
    return _DecodedWhenUsed(not_decoded)


def undecode(metadata: Metadata, not_decoded: NotDecoded) -> None:
    """Converts a metadata object into lazy metadata."""
    fields = vars(metadata)
    fields.clear()
    fields["not_decoded"] = not_decoded
    metadata.__class__ = _DecodedWhenUsed


def index_kept(metadata: Metadata) -> _core.CheckpointIndex | None:
    """Returns the index of lazy metadata. Returns None once the metadata has been decoded, because
    the caller may have changed it."""
    not_decoded = _not_decoded(metadata)
    return None if not_decoded is None else not_decoded.known_index


def reader_kept(metadata: Metadata) -> Any:
    """Returns the reader of lazy metadata. Returns None if it no longer exists, or once the
    metadata has been decoded."""
    not_decoded = _not_decoded(metadata)
    return None if not_decoded is None else not_decoded.reader()


def _not_decoded(metadata: Metadata) -> NotDecoded | None:
    found: NotDecoded | None = object.__getattribute__(metadata, "__dict__").get("not_decoded")
    return found


def _decode(metadata: Metadata) -> None:
    not_decoded = _not_decoded(metadata)
    if not_decoded is not None:
        fields = object.__getattribute__(metadata, "__dict__")
        fields.update(vars(not_decoded.decode()))
        # Remove this last: another thread may decode the metadata at the same time.
        fields.pop("not_decoded", None)
    object.__setattr__(metadata, "__class__", Metadata)


def _reduce(metadata: Metadata) -> Any:
    not_decoded = _not_decoded(metadata)
    if not_decoded is not None and not_decoded.sent is not None:
        return not_decoded.sent
    _decode(metadata)
    return metadata.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


# Allows lazy metadata to be pickled for other ranks, and to be copied, without decoding it.
copyreg.pickle(_DecodedWhenUsed, _reduce)
