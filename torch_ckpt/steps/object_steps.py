"""The steps of a run beneath a URL.

1. A step has its final name from the start: ``0000000100/`` with the objects of a checkpoint. The
   step is complete if it has the marker ``write_completed`` and no object ``deleted``.
2. A save stores data objects under names that no other save uses, then ``.metadata`` on a
   condition, and the marker last (object_step.py).
3. A deletion stores an object ``deleted``, then deletes the marker, the other objects, and
   ``deleted`` last.
4. A sweep completes deletions. It also deletes steps without a marker that this process is not
   saving and whose newest object is older than an hour, by the clocks of the server and of this
   machine. If another process is still saving such a step, that save fails, because it lists its
   objects before it stores ``.metadata``.
5. After a save has stored the marker, it stores the name of the step in ``.last_saved``. A reader
   finds this step by its name, so a server whose listings lag cannot hide the step.
6. The lease of the root is the object ``.lease`` (lease_object.py). The changes of 2 to 4 read the
   lease first. A run that loses the lease after that can still finish one change. The conditions of
   2 keep it from mixing its values with the values of another run, and the epochs in the markers
   show which run is the newer (lineage.py).
7. A load takes no lock. If an object is deleted or replaced during the load, the load fails.
"""

from __future__ import annotations

import errno
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch_ckpt._base.log import LOGGER, warn
from torch_ckpt.checkpoint.index import METADATA_NAME
from torch_ckpt.checkpoint.marker import (
    DELETED_NAME,
    MARKER_NAME,
    PINNED_NAME,
    STEP_NAME,
    list_run,
    read_object_marker,
    step_name,
)
from torch_ckpt.options import ReadOptions, WriteOptions
from torch_ckpt.steps.lease_object import LeaseObject
from torch_ckpt.steps.step_objects import is_saving, objects_of, remove_step
from torch_ckpt.steps.step_store import StepInfo, StepStore, info_of, refuse_checkpoint
from torch_ckpt.stores import Entry, Version, at_once, open_store
from torch_ckpt.stores.probe import PROBE_PREFIX, probe

if TYPE_CHECKING:
    from torch_ckpt.checkpoint.source import Source
    from torch_ckpt.saving.target import Target

#: Age of the newest object, in seconds, after which a step without a marker counts as a leftover.
LEFTOVER_SECONDS = 3600.0

# Number of listings if steps disappear meanwhile.
_LISTINGS = 3


class ObjectSteps(StepStore):
    """The steps beneath a URL; see the module's docstring.

    Args:
        root: the URL.
        storage_options: see :class:`torch_ckpt.WriteOptions`.

    Raises:
        ImportError: the protocol of the URL needs a package that is not installed.
        ValueError: the URL or an option is not allowed.
    """

    sweeps_what_lacks_markers = True

    def __init__(self, root: str, storage_options: Mapping[str, Any] | None = None) -> None:
        self._store = open_store(root, storage_options)
        super().__init__(self._store.root.url, storage_options)
        # The markers that were read last, by step name.
        self._markers: dict[str, tuple[Version, dict[str, Any]]] = {}

    def lease_store(self) -> LeaseObject:
        return LeaseObject(self._store, self._newest_epoch_of_markers)

    def path_of(self, step: int) -> str:
        return self._store.url_of(step_name(step))

    def require_root(self, *, read_only: bool) -> None:
        if self._store.find(METADATA_NAME) is not None:
            refuse_checkpoint(self.root)
        found = probe(self._store, read_only)
        if missing := found.missing():
            raise PermissionError(
                errno.EACCES,
                f"the credentials do not permit: {', '.join(missing)} "
                f"({found.failures[missing[0]].strerror}). Use credentials that permit these "
                "requests",
                self.root,
            )
        for error in found.failures.values():
            raise error
        if (text := found.warning()) is not None:
            warn(f"{self.root}: {text}")

    def newest_epoch(self) -> int:
        found = self.lease_store().read()
        of_lease = 0 if found is None else found.record.epoch
        return max(of_lease, self._newest_epoch_of_markers())

    def entries(self, *, leftovers: bool = True) -> list[StepInfo]:
        # A run deletes a step after it has saved a later one, which may not be listed. Do not list
        # again for ever: a listing that lags behind has deleted objects.
        for _ in range(_LISTINGS):
            steps = _by_step(list_run(self._store).values())
            complete = {n: found[MARKER_NAME] for n, found in steps.items() if _is_complete(found)}
            markers = self._read_markers(complete)
            if markers.keys() == complete.keys():
                break
        infos = []
        for name, objects in sorted(steps.items()):
            url, total = self._store.url_of(name), _bytes_of(objects)
            if name in markers:
                pinned = PINNED_NAME in objects
                infos.append(info_of(int(name), url, markers[name], pinned, lambda n=total: n))  # type: ignore[misc]
            elif leftovers and not _is_complete(objects):
                state = "deleted" if DELETED_NAME in objects else "unfinished"
                infos.append(StepInfo(int(name), url, state, bytes=total))
        return infos

    def sweep(self, *, deleted_only: bool = False, attempt: str = "") -> list[str]:
        swept = []
        found = list(self._store.list())
        if not deleted_only:
            self._delete_probes(found)
        for name, seen in sorted(_by_step(found).items()):
            if not self._is_leftover(name, seen, deleted_only):
                continue
            self._require_lease()
            # List again: a save may have completed the step since.
            objects = self._objects_of(name)
            if not self._is_leftover(name, objects, deleted_only):
                continue
            try:
                self._remove(name, objects)
            except OSError as error:
                # Continue with the other leftovers.
                LOGGER.warning(
                    "a leftover could not be removed: %s. The next sweep will try again", error
                )
            else:
                swept.append(name)
        return swept

    def target(
        self,
        step: int,
        options: WriteOptions,
        *,
        attempt: str,
        may_replace: bool = False,
        marker: Callable[[], dict[str, Any]] = dict,
        make_room: Callable[[], None] = lambda: None,
    ) -> Target:
        """See :meth:`StepStore.target`. Ignores ``attempt``, because names of objects are unique
        without it, and ``make_room``, because stores do not report their free space."""
        from torch_ckpt.steps.object_step import ObjectStepTarget

        return ObjectStepTarget(
            self._store,
            step,
            options,
            may_replace=may_replace,
            marker=marker,
        )

    def delete(self, step: int) -> bool:
        name = step_name(step)
        if self._is_saving(name):
            return False
        objects = self._objects_of(name)
        if objects:
            self._require_lease()
            self._store.put(f"{name}/{DELETED_NAME}", (), 0)
            self._remove(name, objects)
        return True

    def contents(self, name: str) -> tuple[int, int]:
        objects = self._objects_of(name)
        return len(objects), _bytes_of(objects)

    def is_complete(self, step: int) -> bool:
        return self._has(step, MARKER_NAME) and not self._has(step, DELETED_NAME)

    def marker_of(self, step: int) -> dict[str, Any] | None:
        if self._has(step, DELETED_NAME):
            return None
        try:
            marker = self._store.head(f"{step_name(step)}/{MARKER_NAME}")
        except FileNotFoundError:
            return None
        return read_object_marker(self._store, marker)

    def is_pinned(self, step: int) -> bool:
        return self._has(step, PINNED_NAME)

    def _set_pinned(self, step: int, pinned: bool) -> None:
        name = f"{step_name(step)}/{PINNED_NAME}"
        if pinned:
            self._store.put(name, (), 0)
        else:
            self._store.delete([name])

    # --- private ---------------------------------------------------------------------------------

    def _source_of(self, step: int, options: ReadOptions) -> Source:
        from torch_ckpt.steps.object_step import ObjectStepSource

        store = self._store.beneath(step_name(step))
        return ObjectStepSource(store, self._with_storage(options))

    def _require_lease(self) -> None:
        if self.lease is not None:
            self.lease.require()

    def _has(self, step: int, name: str) -> bool:
        return self._store.find(f"{step_name(step)}/{name}") is not None

    def _objects_of(self, name: str) -> dict[str, Entry]:
        """Lists the objects of one step, by their names in the step."""
        return objects_of(self._store.beneath(name))

    def _delete_probes(self, found: Iterable[Entry]) -> None:
        """Deletes what killed probes have left."""
        probes = [entry for entry in found if entry.name.startswith(PROBE_PREFIX)]
        self._store.delete([entry.name for entry in probes if _age([entry]) > LEFTOVER_SECONDS])

    def _read_markers(self, found: dict[str, Entry]) -> dict[str, dict[str, Any]]:
        """Reads markers that have changed since they were read last."""

        def read(name: str) -> tuple[Version, dict[str, Any]] | None:
            entry = found[name]
            known = self._markers.get(name)
            if known is not None and known[0] == entry.version and entry.version.is_unique:
                return known
            marker = read_object_marker(self._store, entry)
            return None if marker is None else (entry.version, marker)

        results = dict(zip(found, at_once(read, found), strict=True))
        self._markers = {name: result for name, result in results.items() if result is not None}
        return {name: marker for name, (_version, marker) in self._markers.items()}

    def _newest_epoch_of_markers(self) -> int:
        return max((info.epoch or 0 for info in self.entries(leftovers=False)), default=0)

    def _is_leftover(self, name: str, objects: dict[str, Entry], deleted_only: bool) -> bool:
        if not objects or self._is_saving(name):
            return False
        if DELETED_NAME in objects:
            return True
        if deleted_only or _is_complete(objects):
            return False
        return _age(objects.values()) > LEFTOVER_SECONDS

    def _is_saving(self, name: str) -> bool:
        return is_saving(self._store.url_of(name))

    def _remove(self, name: str, objects: dict[str, Entry]) -> None:
        remove_step(self._store.beneath(name), objects)


def _by_step(found: Iterable[Entry]) -> dict[str, dict[str, Entry]]:
    """Returns the objects of all steps, by the name of the step and their names in it."""
    steps: dict[str, dict[str, Entry]] = defaultdict(dict)
    for entry in found:
        step, _slash, name = entry.name.partition("/")
        if name and STEP_NAME.match(step):
            steps[step][name] = entry
    return steps


def _is_complete(objects: dict[str, Entry]) -> bool:
    return MARKER_NAME in objects and DELETED_NAME not in objects


def _bytes_of(objects: dict[str, Entry]) -> int:
    return sum(entry.bytes for name, entry in objects.items() if name != MARKER_NAME)


def _age(objects: Iterable[Entry]) -> float:
    """Returns the seconds since the last write; 0 if the store does not report all times."""
    times = [entry.modified for entry in objects]
    known = [written for written in times if written is not None]
    return time.time() - max(known) if known and len(known) == len(times) else 0.0
