"""The objects of one step beneath a URL: listed, deleted, and in use by a save of this process."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch_ckpt.checkpoint.marker import DELETED_NAME, MARKER_NAME
from torch_ckpt.stores import Entry, ObjectStore

if TYPE_CHECKING:
    from torch_ckpt.saving.target import Target

#: The targets that this process is writing to.
open_targets: weakref.WeakSet[Target] = weakref.WeakSet()


def is_saving(url: str) -> bool:
    """True if this process is saving the step."""
    return any(target.path == url for target in list(open_targets))


def objects_of(step: ObjectStore) -> dict[str, Entry]:
    """Lists the objects of a step by name."""
    return {entry.name: entry for entry in step.list()}


def remove_step(step: ObjectStore, names: Iterable[str]) -> None:
    """Deletes the objects of a step, in the order of object_steps.py."""
    others = set(names) - {MARKER_NAME, DELETED_NAME}
    step.delete([MARKER_NAME])
    step.delete(sorted(others))
    step.delete([DELETED_NAME])
