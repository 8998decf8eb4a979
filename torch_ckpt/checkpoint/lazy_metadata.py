"""Lazy metadata. It is decoded into torch's objects on first access, because that is slow."""

from __future__ import annotations

import copyreg
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from torch_ckpt import _core


@dataclass(frozen=True)
class LazyContents:
    """The contents of lazy metadata.

    Attributes:
        decode: decodes the metadata into torch's objects.
        index: the index of the metadata, if it has been built.
        reader: returns the reader of the checkpoint, or None if it no longer exists.
    """

    decode: Callable[[], Metadata]
    index: _core.CheckpointIndex | None = None
    reader: Callable[[], Any] = lambda: None


class LazyMetadata(Metadata):
    """Metadata that the first access to an attribute decodes. It pretends to be of torch's class,
    also to pickle and in comparisons.

    Args:
        contents: the lazy contents.
    """

    __slots__ = ("_lazy",)
    _lazy: LazyContents | None

    def __init__(self, contents: LazyContents) -> None:
        object.__setattr__(self, "_lazy", contents)

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return Metadata
        _decode(self)
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _decode(self)
        object.__setattr__(self, name, value)


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
    decoded = Metadata.__new__(Metadata)
    vars(decoded).update(vars(metadata))
    return decoded.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


# Lazy metadata is pickled and copied as torch's class.
copyreg.pickle(LazyMetadata, _reduce)
