"""The files of a checkpoint that are in a store, as the engine's functions accept them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch_ckpt import _core


class InStore(Protocol):
    """An object with the files of a checkpoint that are in a store."""

    @property
    def files(self) -> _core.Store: ...
