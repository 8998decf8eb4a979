"""Lazy metadata, decoded into torch's objects on first access, because these take long to build."""

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
        decode: builds torch's objects.
        sent: result of ``__reduce__`` while it is lazy; None pickles torch's objects.
        known_index: the index of the metadata, if it has been built.
        reader: returns the reader of the checkpoint, while it exists.
    """

    decode: Callable[[], Metadata]
    sent: tuple[Callable[..., Metadata], tuple[Any, ...]] | None = None
    known_index: _core.CheckpointIndex | None = None
    reader: Callable[[], Any] = lambda: None


class _DecodedWhenUsed(Metadata):
    """Metadata that has not been accessed yet."""

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
    """Returns lazy metadata."""
    return _DecodedWhenUsed(not_decoded)


def undecode(metadata: Metadata, not_decoded: NotDecoded) -> None:
    """Turns metadata into lazy metadata."""
    fields = vars(metadata)
    fields.clear()
    fields["not_decoded"] = not_decoded
    metadata.__class__ = _DecodedWhenUsed


def index_kept(metadata: Metadata) -> _core.CheckpointIndex | None:
    """Returns the index of lazy metadata; None once it was accessed, because it may have been
    changed."""
    not_decoded = _not_decoded(metadata)
    return None if not_decoded is None else not_decoded.known_index


def reader_kept(metadata: Metadata) -> Any:
    """Returns the reader of lazy metadata; None if there is none, or once it was accessed."""
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
        # Last, because another thread may access it at the same time.
        fields.pop("not_decoded", None)
    object.__setattr__(metadata, "__class__", Metadata)


def _reduce(metadata: Metadata) -> Any:
    not_decoded = _not_decoded(metadata)
    if not_decoded is not None and not_decoded.sent is not None:
        return not_decoded.sent
    _decode(metadata)
    return metadata.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


# Lets lazy metadata be pickled for other ranks, and copied, without decoding it.
copyreg.pickle(_DecodedWhenUsed, _reduce)
