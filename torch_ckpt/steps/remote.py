"""The steps of a run beneath a URL that fsspec supports: object stores, and other file systems.

1. A step has its final name from the start: ``0000000100/`` with the files of a checkpoint. It is
   complete once it has the marker ``write_completed``, which is written last (remote_target.py).
2. A deletion first writes a file ``deleted``, then removes the marker, the other files, and
   ``deleted`` last.
3. A sweep completes deletions. It also removes steps without a marker that this process is not
   saving and whose newest file is older than an hour. If another process is still saving such a
   step, that save fails, because it checks that its files exist before it writes the marker.
4. A load fetches byte ranges (remote_reader.py). It takes no lock. If the step is deleted or
   replaced during the load, the load fails, because the files of each save have different names.
"""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from torch_ckpt._base.log import LOGGER
from torch_ckpt.checkpoint.files import is_inside_checkpoint
from torch_ckpt.checkpoint.index import METADATA_NAME
from torch_ckpt.checkpoint.marker import MOST_MARKER_BYTES, parsed_marker
from torch_ckpt.checkpoint.step_names import MARKER_NAME, PINNED_NAME, STEP_NAME, step_name
from torch_ckpt.inspection.verify import VerifyReport, verify
from torch_ckpt.options import DEFAULT_READ_OPTIONS, ReadOptions, WriteOptions
from torch_ckpt.steps.busy import DELETED_NAME, busy
from torch_ckpt.steps.remote_files import RemoteFile, RemoteFiles, age, require_staging_room
from torch_ckpt.steps.step_store import StepInfo, StepStore, info_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from typing_extensions import Unpack  # in typing since Python 3.11

    from torch_ckpt.checkpoint.opened import Checkpoint
    from torch_ckpt.loading.load import LoadArguments
    from torch_ckpt.loading.report import LoadReport
    from torch_ckpt.saving.target import Target

#: Age of the newest file, in seconds, after which a step without a marker counts as a leftover.
LEFTOVER_SECONDS = 3600.0

_OWN_NAMES = {METADATA_NAME, MARKER_NAME, PINNED_NAME, DELETED_NAME}


class RemoteSteps(StepStore):
    """The steps beneath a URL.

    Args:
        root: the URL. Credentials and other settings are configured in fsspec.
        staging_dir: local directory for staging; None uses the system's temporary directory. A save
            needs space for everything that its rank writes. A load needs 1 GiB, or more if it reads
            more than that from one record. ``verify`` needs 4 GiB, or the size of the largest file
            if that is larger.
        verified_at_once: number of bytes that ``verify`` stages at once; one file may be larger.

    Raises:
        ImportError: the file system of the URL needs a package that is not installed.
        ValueError: fsspec does not support the URL's protocol.
    """

    sweeps_what_lacks_markers = True

    def __init__(
        self,
        root: str,
        staging_dir: str | os.PathLike[str] | None = None,
        *,
        verified_at_once: int = 4 << 30,
    ) -> None:
        super().__init__(root.rstrip("/"))
        self._verified_at_once = verified_at_once
        self._files = RemoteFiles(self.root)
        self._staging_dir = None if staging_dir is None else os.fspath(staging_dir)
        self._epoch: int | None = None

    def require_root(self) -> None:
        """Checks nothing: it would take another request."""

    def newest_epoch(self) -> int:
        # Only steps copied from a local root have epochs, because URLs have no leases. Read the
        # markers once, because each is a request.
        if self._epoch is None:
            infos = self.entries(leftovers=False)
            self._epoch = max((info.epoch or 0 for info in infos), default=0)
        return self._epoch

    def entries(self, *, leftovers: bool = True) -> list[StepInfo]:
        steps = self._list_steps()
        markers: dict[str, dict[str, Any]] = {}

        def read(name: str) -> None:
            if steps[name][MARKER_NAME].bytes > MOST_MARKER_BYTES:
                # Too large to be read. A step with any marker is complete.
                markers[name] = {}
                return
            # Another process may have deleted the step.
            with suppress(FileNotFoundError):
                data = self._files.read(f"{name}/{MARKER_NAME}")
                markers[name] = parsed_marker(data)

        complete = [name for name, files in steps.items() if _is_complete(files)]
        self._files.for_each(read, ((name,) for name in complete))
        found = []
        for name, files in sorted(steps.items()):
            url = self._files.url_of(name)
            total = sum(file.bytes for file in files.values())
            if name in markers:
                pinned = PINNED_NAME in files
                bytes_of = partial(int, total)
                found.append(info_of(int(name), url, markers[name], pinned, bytes_of))
            elif leftovers:
                state = "deleted" if DELETED_NAME in files else "unfinished"
                found.append(StepInfo(int(name), url, state, bytes=total))
        return found

    def sweep(self, *, deleted_only: bool = False, attempt: str = "") -> list[str]:
        swept = []
        for name, seen in sorted(self._list_steps().items()):
            if not _is_leftover(seen, deleted_only):
                continue
            with busy.reserved(self._files.url_of(name)) as is_free:
                # List again: a save may have completed the step since.
                files = self._files.below(name).list() if is_free else {}
                if not _is_leftover(files, deleted_only):
                    continue
                try:
                    self._remove(name, files)
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
        """See :meth:`StepStore.target`. Ignores ``attempt``, because file names are unique without
        it. Checks only the free space of the staging directory, because remote file systems do not
        report their free space."""
        from torch_ckpt.steps.remote_target import RemoteStepTarget

        return RemoteStepTarget(
            self._files.below(step_name(step)),
            step,
            self._staging_dir,
            may_replace=may_replace,
            marker=marker,
            options=options,
        )

    def load(
        self,
        step: int,
        state_dict: dict[str, Any],
        options: ReadOptions = DEFAULT_READ_OPTIONS,
        **arguments: Unpack[LoadArguments],
    ) -> LoadReport | Checkpoint:
        from torch_ckpt.loading.load import load
        from torch_ckpt.steps.remote_reader import RemoteSource

        files, staging = self._files.below(step_name(step)), self._staging_dir
        busy.begin(files.url)
        try:
            source_of = partial(RemoteSource, files, staging, options)
            return load(state_dict, source_of, **arguments)
        finally:
            busy.end(files.url)

    def metadata(self, step: int) -> Metadata:
        from torch_ckpt.steps.remote_reader import RemoteSource

        with closing(RemoteSource(self._files.below(step_name(step)), self._staging_dir)) as source:
            source.open()
            return source.metadata()

    def verify(self, step: int) -> VerifyReport:
        started = time.perf_counter()
        files = self._files.below(step_name(step))
        listing = files.list()
        for needed in (METADATA_NAME, MARKER_NAME):
            if needed not in listing:
                raise FileNotFoundError(
                    errno.ENOENT, f"not a complete checkpoint: {needed} is missing", files.url
                )
        total = VerifyReport(files.url)
        unverifiable: set[str] = set()
        busy.begin(files.url)
        try:
            for batch in _batches(listing, self._verified_at_once):
                with tempfile.TemporaryDirectory(
                    prefix="torch_ckpt-", dir=self._staging_dir
                ) as staging:
                    wanted = sum(listing[name].bytes for name in (METADATA_NAME, *batch))
                    require_staging_room(staging, wanted, files.url)
                    _download(files, [METADATA_NAME, *batch], staging)
                    part = verify(staging)
                total.records += part.records
                total.bytes += part.bytes
                total.damaged += part.damaged
                total.unread += part.unread
                total.unreferenced += part.unreferenced
                unverifiable.update(part.unverifiable)
                # These are computed from the metadata only, so they are equal for all batches.
                total.incomplete = part.incomplete
                total.missing = [entry for entry in part.missing if entry[0] not in listing]
        finally:
            busy.end(files.url)
        total.unverifiable = sorted(unverifiable)
        total.unreferenced += [name for name in listing if not is_inside_checkpoint(name)]
        total.seconds = time.perf_counter() - started
        return total

    def delete(self, step: int) -> bool:
        name = step_name(step)
        with busy.reserved(self._files.url_of(name)) as is_free:
            files = self._files.below(name).list() if is_free else {}
            if files:
                self._files.write(f"{name}/{DELETED_NAME}", b"")
                self._remove(name, files)
        return is_free

    def contents(self, name: str) -> tuple[int, int]:
        files = self._files.below(name).list()
        return len(files), sum(file.bytes for file in files.values())

    def is_complete(self, step: int) -> bool:
        return _is_complete(self._files.below(step_name(step)).list())

    def is_pinned(self, step: int) -> bool:
        return PINNED_NAME in self._files.below(step_name(step)).list()

    def path_of(self, step: int) -> str:
        return self._files.url_of(step_name(step))

    def _set_pinned(self, step: int, pinned: bool) -> None:
        files = self._files.below(step_name(step))
        if pinned:
            files.write(PINNED_NAME, b"")
        else:
            files.remove([PINNED_NAME])

    # --- private ---------------------------------------------------------------------------------

    def _list_steps(self) -> dict[str, dict[str, RemoteFile]]:
        """Lists the files of each step, by the step's ten digits and the file's name."""
        steps: dict[str, dict[str, RemoteFile]] = defaultdict(dict)
        for path, file in self._files.list().items():
            step, _slash, name = path.partition("/")
            if name and STEP_NAME.match(step):
                steps[step][name] = file
        return steps

    def _remove(self, name: str, files: dict[str, RemoteFile]) -> None:
        """Removes all files of a step, in the order that the module docstring describes."""
        step = self._files.below(name)
        step.remove({MARKER_NAME} & files.keys())
        step.remove(files.keys() - {MARKER_NAME, DELETED_NAME})
        step.remove([DELETED_NAME])
        step.remove_directory()


def _is_complete(files: dict[str, RemoteFile]) -> bool:
    return MARKER_NAME in files and DELETED_NAME not in files


def _is_leftover(files: dict[str, RemoteFile], deleted_only: bool) -> bool:
    if DELETED_NAME in files:
        return True
    if not files or deleted_only or _is_complete(files):
        return False
    return age(files.values()) > LEFTOVER_SECONDS


def _batches(listing: dict[str, RemoteFile], most: int) -> Iterator[list[str]]:
    """Groups the data files that are staged together. Yields an empty group if there are none.

    Args:
        most: size limit of a group, in bytes. A larger file forms a separate group.
    """
    batch: list[str] = []
    total = 0
    for name in sorted(listing.keys() - _OWN_NAMES):
        # Metadata cannot refer to a file with such a name.
        if not is_inside_checkpoint(name):
            continue
        if batch and total + listing[name].bytes > most:
            yield batch
            batch, total = [], 0
        batch.append(name)
        total += listing[name].bytes
    yield batch


def _download(files: RemoteFiles, names: list[str], directory: str) -> None:
    def download(name: str) -> None:
        target = os.path.join(directory, name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        files.download(name, target)

    files.for_each(download, ((name,) for name in names))
