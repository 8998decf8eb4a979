"""One rank's write in a save: from its values to durable files.

Every write of the engine takes these steps.

1. For a snapshot, the :class:`RankWrite` is made when the user calls. It records the versions of
   the sources and the work submitted to the devices' streams at that moment.
2. ``run`` starts the engine in the calling thread. The engine copies all values into its chunks.
3. The versions are compared. If a source was written to in the meantime, the write fails and names
   it. Otherwise the write is *staged*, and all sources are released.
4. The engine's threads write and fsync. ``run`` returns the files and the locations in them.

Without a snapshot, the caller waits for all steps, and no versions are compared. From step 2 on,
any thread may query the progress, cancel the write, or make the devices' streams wait for step 3.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from torch_ckpt import _C, _core
from torch_ckpt._base.cuda_events import record_events
from torch_ckpt._base.cycle_collector import no_gc
from torch_ckpt._base.options import require_at_least, require_io_options
from torch_ckpt._base.progress import Progress, ProgressOption, reporting
from torch_ckpt.checkpoint.directory import DirectoryIdentity, OpenDirectory
from torch_ckpt.saving.background import Background, EngineOptions
from torch_ckpt.saving.host_memory import default_snapshot_bytes, limit_to_budget
from torch_ckpt.saving.items import Written
from torch_ckpt.saving.snapshots import source_changed

# Seconds between two checks of a write, without and with a progress bar.
_REST_SECONDS = 5.0
_SHOWN_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class WriteOptions:
    """Options of one rank's write; see :class:`FileSystemWriter`.

    Raises:
        ValueError: an option is out of range or contradicts another one.
    """

    thread_count: int
    bytes_per_file: int
    single_file_per_rank: bool
    separation_hint: str | None
    max_host_bytes: int | None
    direct_io: bool | str
    sync_files: bool
    progress: ProgressOption

    def __post_init__(self) -> None:
        require_io_options(self.thread_count, self.direct_io)
        hint = self.separation_hint or ""
        if hint and self.thread_count < 2:
            raise ValueError(
                "separation_hint requires thread_count >= 2, because matching and other items "
                f"go to separate files; got {self.thread_count}"
            )
        # Readers refuse file names with backslashes.
        if "/" in hint or "\\" in hint or hint.startswith("."):
            raise ValueError(
                "separation_hint is used as a prefix of file names, so it must not contain a slash "
                f"or a backslash or begin with a dot, got {hint!r}"
            )
        if self.max_host_bytes is not None:
            require_at_least("max_host_bytes", self.max_host_bytes, 4096)

    def __getstate__(self) -> dict[str, Any]:
        # Progress bars and callbacks belong to the caller's process.
        return self.__dict__ | {"progress": None}


class Sources(Protocol):
    """The tensors of a snapshot, whose contents the engine reads later."""

    @property
    def devices(self) -> list[torch.device]:
        """The CUDA devices of the tensors."""

    def changed(self) -> list[str]:
        """Returns the names of the tensors that were written to since the snapshot was taken."""

    def release(self) -> None:
        """Releases the tensors."""


class RankWrite:
    """One rank's write; the module's docstring describes its steps.

    Args:
        sources: the tensors of a snapshot; None: ``run`` blocks its caller until the end.
        background: priorities of the engine's threads; None: the priorities of a foreground
            save.
        quiet_stagers: give the threads that copy from the sources the low priority of the writers,
            too.
        ranks: number of ranks that save together, which share the host's memory.
        advice: what to do about a source that was written to too early, for the error.
        trace: record each stretch of work.
        children: channel that passes the results to children forked during the write, too.
        staged: the future to use as the attribute ``staged``.

    Attributes:
        staged: future that is done when the sources may change; it fails if the write fails before.
        begun: start of the engine, by ``time.perf_counter()``; None before.
        timing: durations in the engine, set at the end; see ``_C.Save.timing``. None if the engine
            has not started.
        stretches: stretches of work, set at the end of a traced write; see ``_C.Save.trace``.
    """

    def __init__(
        self,
        sources: Sources | None = None,
        *,
        background: Background | None = None,
        quiet_stagers: bool = True,
        ranks: int = 1,
        advice: str = "",
        trace: bool = False,
        children: _core.ProcessChannel | None = None,
        staged: Future[None] | None = None,
    ) -> None:
        self.staged: Future[None] = Future() if staged is None else staged
        self.begun: float | None = None
        self.timing: tuple[float, ...] | None = None
        self.stretches: list[tuple[str, int, float, float]] = []
        self._sources = sources
        self._background = background
        self._quiet_stagers = quiet_stagers
        self._ranks = ranks
        self._advice = advice
        self._trace = trace
        self._children = children
        #: Called once while the engine writes, by the thread that waits for the engine.
        self.meanwhile: Callable[[], None] = lambda: None
        self._save: _C.Save | None = None
        self._progress = Progress(0, 0, 0)
        self._is_cancelled = False
        self._lock = threading.Lock()
        self._changed: list[str] | None = None
        # Set when the engine has started, or will not start.
        self._started = threading.Event()
        self._ready = record_events(sources.devices if sources is not None else ())

    # --- by the thread that writes ---------------------------------------------------------------

    @contextlib.contextmanager
    def device_streams(self) -> Iterator[None]:
        """Context manager whose device work runs in side streams, after all work submitted before
        the call."""
        with contextlib.ExitStack() as stack:
            streams = []
            for event, device in self._ready:
                stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                stream.wait_event(event)
                stack.enter_context(torch.cuda.stream(stream))
                streams.append((stream, device))
            yield
            self._ready = [(stream.record_event(), device) for stream, device in streams]

    def run(
        self,
        directory: OpenDirectory,
        options: WriteOptions,
        prefix: str,
        sources: _C.SaveSources,
        title: str,
        rank: int | None,
    ) -> Written:
        """Writes tensors and bytes, fsyncs the files, and waits for the end.

        Args:
            prefix: prefix of the file names, ``__{rank}_``.
            sources: the values to write. This method empties the sources.
            title: title of the progress bar.
            rank: the rank of this process, which decides whether to show a bar.

        Raises:
            OSError: a system call failed. All files of this write were removed.
            SourceChanged: a source was written to before it was copied.
        """
        begin = time.perf_counter()
        is_snapshot = self._sources is not None
        if not is_snapshot:
            # Other streams read the CUDA tensors that the current streams compute.
            for device in sources.devices():
                torch.cuda.current_stream(device).synchronize()
        engine_options = None
        if self._background is not None:
            engine_options = EngineOptions(
                self._background,
                snapshot=is_snapshot,
                quiet_stagers=self._quiet_stagers,
                ready=[(device.index, event.cuda_event) for event, device in self._ready],
                trace=self._trace,
                children=self._children,
            )
        max_host_bytes = options.max_host_bytes or 0
        if is_snapshot:
            if max_host_bytes:
                limit_to_budget(max_host_bytes)
            else:
                max_host_bytes = default_snapshot_bytes(self._ranks)
        identity = DirectoryIdentity.of(directory)
        save = _C.start_save(
            directory,
            prefix,
            sources,
            buckets=options.thread_count,
            bytes_per_bucket=options.bytes_per_file,
            file_per_item=not options.single_file_per_rank,
            separation_hint=options.separation_hint or "",
            max_host_bytes=max_host_bytes,
            direct_io=options.direct_io,
            sync=options.sync_files,
            background=engine_options,
        )
        self._save = save
        try:
            with reporting(options.progress, title, rank, save.progress()[0]) as show:
                # Wake up regularly to show progress and to let Ctrl-C in, which only reaches the
                # main thread.
                rest = _SHOWN_SECONDS if show is not None or not is_snapshot else _REST_SECONDS
                if self._sources is not None:
                    _core.fault_point("engine has begun", directory.path)
                    self.begun = time.perf_counter() - save.elapsed()
                    if self._is_cancelled:
                        save.cancel()
                    self._started.set()
                    self._wait_for(save.wait_staged, rest, show)
                    save.release_sources()
                    _core.fault_point("sources are copied", directory.path)
                    with self._lock:
                        changed = self._changed
                        if changed is None:
                            changed = self._sources.changed()
                    self._sources.release()
                    if changed:
                        raise source_changed(changed, self._advice)
                    self.staged.set_result(None)
                self.meanwhile()
                # The release of thousands of tensors takes long: do it while the engine writes.
                self._wait_for(save.wait_staged, rest, show)
                save.release_sources()
                self._wait_for(save.wait, rest, show)
                _core.fault_point("files are written", directory.path)
        except BaseException:
            # The error refers to this frame and thereby to `save`, so dropping `save` would not end
            # it.
            _give_up(save, directory)
            raise
        finally:
            self._progress = Progress(*save.progress()[:3])
            self.timing = save.timing()
            if self._trace:
                self.stretches = list(save.trace())
            # The session has returned its chunks to the pool. Release its own memory, too.
            self._save = None
            # A kept error keeps this frame alive, but must not keep the directory open.
            del directory
        with no_gc():
            return Written(save.results(), identity, (time.perf_counter() - begin,))

    def end(self, error: BaseException | None) -> None:
        """Releases the sources and all waiting threads: the write has ended, or will not start.

        Args:
            error: the cause of the failure, if it failed.
        """
        if self._sources is not None:
            self._sources.release()
        self._ready = []
        self._started.set()
        if error is not None and not self.staged.done():
            self.staged.set_exception(error)

    # --- by any thread ---------------------------------------------------------------------------

    def wait_staged(self) -> None:
        """Waits until the sources may change or the write has failed."""
        wait_quietly(self.staged)

    def progress(self) -> Progress:
        """Returns the progress in bytes."""
        save = self._save
        if save is not None:
            self._progress = Progress(*save.progress()[:3])
        return self._progress

    def moved(self) -> int:
        """Returns a number that grows for as long as the write makes progress."""
        progress = self.progress()
        return progress.bytes_staged + progress.bytes_done

    def cancel(self) -> None:
        """Makes the write fail and remove its files, unless it has ended."""
        self._is_cancelled = True
        # Use a local copy: the writing thread resets the attribute at the end.
        save = self._save
        if save is not None:
            save.cancel()

    def state(self, where: str, prefix: str) -> str:
        """Describes what the write is doing, for a message: files, phase and bytes.

        Args:
            where: the directory, as the user knows it.
            prefix: prefix of the file names, as the user knows them.
        """
        save = self._save
        if save is None:
            return f"files {prefix}* in {where}: no bytes written yet"
        planned, staged, written, files, done = save.progress()
        phase = "staging" if staged < planned else "writing" if written < planned else "fsync"
        unfinished = ", ".join(
            f"{name}: {doing}, {so_far} of {size} bytes"
            for name, doing, so_far, size in save.unfinished()
        )
        return (
            f"{', '.join(save.file_names)} in {where}: {phase}, "
            f"{written} of {planned} bytes written, {done} of {files} files done"
            + (f"; {unfinished}" if unfinished else "")
        )

    def hold_back(self, has_ended: Callable[[], bool]) -> bool:
        """Makes the current streams of the sources' devices wait for the copies.

        Args:
            has_ended: returns True if the save has ended.

        Returns:
            False if the caller must wait itself: there are no devices, or the streams cannot wait,
            for example while one captures a CUDA graph.
        """
        if not self._ready:
            return False
        while not self._started.wait(1.0):
            if has_ended():
                return True
        save = self._save
        if save is None:
            return True
        # The save itself reports its errors.
        with contextlib.suppress(Exception), self._lock:
            while not save.wait_submitted(1.0):
                pass
            for _event, device in self._ready:
                stream = torch.cuda.current_stream(device).cuda_stream
                save.make_stream_wait(device.index, stream)
            # The device runs all later work of the stream after the copies.
            if self._changed is None and self._sources is not None:
                self._changed = self._sources.changed()
            return True
        return False

    # --- private ---------------------------------------------------------------------------------

    def _wait_for(
        self, wait: Callable[[float], bool], rest: float, show: Callable[[Progress], None] | None
    ) -> None:
        is_done = False
        while not is_done:
            is_done = wait(rest)
            if show is not None:
                show(self.progress())


def wait_quietly(future: Future[Any]) -> None:
    """Waits until the future is done. Does not mark its error as reported."""
    Future.exception(future)


def _give_up(save: _C.Save, directory: OpenDirectory) -> None:
    """Cancels a write and removes its files."""
    save.cancel()
    try:
        while not save.wait(1.0):
            pass
    except Exception:
        return  # a failed save has removed its files
    _core.remove_files(directory, save.file_names)
