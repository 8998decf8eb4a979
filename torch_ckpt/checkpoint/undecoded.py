"""Metadata that becomes torch's objects when somebody looks at it: they take long to make."""

from __future__ import annotations

import copyreg
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata

from torch_ckpt import _core


class NotDecoded(NamedTuple):
    """What metadata is until then.

    Attributes:
        decode: makes torch's objects.
        sent: what it is pickled as, as of ``__reduce__``; None: as torch's objects.
        says: the same without them, where it has been read.
        reader: gives the reader of the checkpoint, while there is one.
    """

    decode: Callable[[], Metadata]
    sent: tuple[Callable[..., Metadata], tuple[Any, ...]] | None = None
    says: _core.CheckpointIndex | None = None
    reader: Callable[[], Any] = lambda: None


class _DecodedWhenUsed(Metadata):
    """Metadata of which nobody has looked at anything."""

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
    """Metadata that is decoded when somebody looks at it."""
    return _DecodedWhenUsed(not_decoded)


def undecode(metadata: Metadata, not_decoded: NotDecoded) -> None:
    """Lets metadata that is here become that."""
    fields = vars(metadata)
    fields.clear()
    fields["not_decoded"] = not_decoded
    metadata.__class__ = _DecodedWhenUsed


def index_kept(metadata: Metadata) -> _core.CheckpointIndex | None:
    """That of metadata at which nobody has looked: then it has not been changed."""
    not_decoded = _not_decoded(metadata)
    return None if not_decoded is None else not_decoded.says


def reader_kept(metadata: Metadata) -> Any:
    """The reader of metadata at which nobody has looked; None where there is none."""
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
        # Last: another thread may look at it meanwhile.
        fields.pop("not_decoded", None)
    object.__setattr__(metadata, "__class__", Metadata)


def _reduce(metadata: Metadata) -> Any:
    not_decoded = _not_decoded(metadata)
    if not_decoded is not None and not_decoded.sent is not None:
        return not_decoded.sent
    _decode(metadata)
    return metadata.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


# Pickled, as to other ranks, and copied without being decoded.
copyreg.pickle(_DecodedWhenUsed, _reduce)
