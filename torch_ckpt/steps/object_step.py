"""One step beneath a URL, as the target of a save and as the source of loads.

The steps have the numbers of the steps in saving/object_target.py, which has the rest.

1. The coordinator completes an interrupted deletion of the step. It refuses a complete step that
   the save must not replace.
2. As in saving/object_target.py.
3. a. The coordinator reads the lease, and lists the objects of the step. If a file of the save is
      missing, because another job has swept it, the save fails.
   b. It stores ``.metadata``, on the condition that the object has not changed since step 1. From
      here on, a step that is replaced has the new values, and still the former marker.
   c. It stores the marker. The step is now complete. Then it stores the name of the step in the
      object ``.last_saved`` of the root.
   d. It deletes all objects of the step that the metadata does not name.
4. If the request of 3c is refused, the coordinator restores the former ``.metadata``. If there was
   none, it deletes its own. Then the files of the save are deleted.
5. If the outcome of 3b or 3c is unknown, or 4 fails, no object is deleted. A sweep deletes a step
   without a marker an hour later.

If the coordinator dies between 3b and 3c, a new step is not complete. A step that was replaced has
the values of the new save, and the metrics and notes of the former.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch_ckpt._base.log import LOGGER
from torch_ckpt.checkpoint.index import METADATA_NAME
from torch_ckpt.checkpoint.marker import (
    DELETED_NAME,
    LAST_SAVED_NAME,
    MARKER_NAME,
    PINNED_NAME,
    encoded_marker,
    step_name,
)
from torch_ckpt.checkpoint.source import RemoteMetadata, Source
from torch_ckpt.errors import DurabilityUncertain, NotCommitted
from torch_ckpt.options import ReadOptions, WriteOptions
from torch_ckpt.saving.object_target import ObjectTarget
from torch_ckpt.saving.target import Opened
from torch_ckpt.steps.step_objects import objects_of, open_targets, remove_step
from torch_ckpt.steps.step_store import refuse_complete_step
from torch_ckpt.stores import ObjectStore
from torch_ckpt.stores.store_errors import unknown_outcome


class ObjectStepTarget(ObjectTarget):
    """One step beneath a URL; see the module's docstring.

    Args:
        root: the objects of the run.
        step: step number.
        options: the options of the save.
        may_replace, marker: see :meth:`StepStore.target`.
    """

    def __init__(
        self,
        root: ObjectStore,
        step: int,
        options: WriteOptions,
        *,
        may_replace: bool,
        marker: Callable[[], dict[str, Any]],
    ) -> None:
        super().__init__(root.beneath(step_name(step)), options)
        self._root = root
        self._step = step
        self._may_replace = may_replace
        self._marker = marker

    def open(self, rank: int, ranks: int) -> Opened:
        opened = super().open(rank, ranks)
        open_targets.add(self)
        return opened

    def discard(self) -> None:
        super().discard()
        open_targets.discard(self)

    def require_replaceable(self) -> None:
        if self._store.find(DELETED_NAME) is not None:
            remove_step(self._store, objects_of(self._store))
            self._replaced = None
        elif not self._may_replace and self._store.find(MARKER_NAME) is not None:
            refuse_complete_step(self.path)

    def commit_metadata(self, data: bytes, files: Collection[str]) -> Collection[str]:
        facts = self._marker()
        try:
            former, objects = self.read_replaced(), objects_of(self._store)
        except OSError as error:
            raise NotCommitted(str(error), error.errno or 0) from None
        if not self._may_replace and MARKER_NAME in objects:
            refuse_complete_step(self.path)
        missing = sorted(set(files) - objects.keys())
        if missing or DELETED_NAME in objects:
            raise NotCommitted(
                f"{self.path}: {len(missing)} of the {len(files)} files that this save has stored "
                f"no longer exist{f', for example {missing[0]}' if missing else ''}; check that no "
                "other job saves, deletes or sweeps beneath this root"
            )
        total = sum(objects[file].bytes for file in files) + len(data)
        facts = {"step": self._step, "saved_at": time.time(), "bytes": total, **facts}
        document = encoded_marker(facts)
        self.store_metadata(data)
        try:
            self._store.put(MARKER_NAME, [memoryview(document)], len(document))
        except OSError as error:
            self._undo(error, former)
        self._record_last_saved()
        return objects.keys() - {*files, self._metadata, MARKER_NAME, PINNED_NAME}

    def _record_last_saved(self) -> None:
        name = step_name(self._step).encode()
        try:
            self._root.put(LAST_SAVED_NAME, [memoryview(name)], len(name))
        except OSError as error:
            # The step is complete. Only a listing that lags could hide it.
            LOGGER.warning("%s: %s", self.path, error)

    def _undo(self, error: OSError, former: bytes | None) -> None:
        """Restores the former metadata after the marker could not be stored.

        Raises:
            NotCommitted: it is restored.
            DurabilityUncertain: the marker may have been stored, or the former metadata could not
                be restored.
        """
        number = error.errno or 0
        try:
            if unknown_outcome(error):
                raise error
            if former is None:
                self._store.delete([self._metadata])
            else:
                self._store.exchange(self._metadata, former, self._stored)
        except OSError as second:
            self.keep_all()
            raise DurabilityUncertain(
                f"{error}; the step may have the values of this save", number
            ) from second
        raise NotCommitted(str(error), number) from None


class ObjectStepSource(Source):
    """One step beneath a URL that is read. An incomplete step is refused, even with metadata."""

    def __init__(self, store: ObjectStore, options: ReadOptions) -> None:
        super().__init__(store.root.url, options)
        self._store = store

    def open(
        self,
        names: Sequence[str] = (METADATA_NAME,),
        received: RemoteMetadata | None = None,
    ) -> None:
        if received is None and self._store.find(MARKER_NAME) is None:
            raise FileNotFoundError(
                errno.ENOENT, f"not a complete step: {MARKER_NAME} is missing", self.location
            )
        super().open(names, received)
