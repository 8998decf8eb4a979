"""One rank's files of one save, from its values to files that are durable.

Whatever is written by the engine goes this way, by whoever calls.

1. The :class:`RankWrite` of a snapshot is made at the call: the versions of its sources, and what
   the devices' streams have been given, are of that moment.
2. ``run`` starts the engine, in whichever thread calls it. The engine copies all values into its
   chunks.
3. The versions are compared. A source that was written to meanwhile fails the write by its name;
   else the write is *staged*, and every source is let go of.
4. The engine's threads write and fsync. ``run`` returns what was written, and where.

Without a snapshot its caller waits for all of it, and there is no 3. From 2 on any thread may ask
how far it is, cancel it, or have the devices' streams wait for 3.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch

from torch_ckpt import _C, _core
from torch_ckpt._base.cuda_events import record_events
from torch_ckpt._base.cycle_collector import no_gc
from torch_ckpt._base.progress import Progress, ProgressOption, Reporter
from torch_ckpt.checkpoint.directory import OpenDirectory, Place
from torch_ckpt.saving.background import Background, EngineOptions
from torch_ckpt.saving.host_memory import default_snapshot_bytes
from torch_ckpt.saving.items import Written
from torch_ckpt.saving.sources import Watched, source_changed

# Seconds between two looks at a write that nobody looks at.
_REST_SECONDS = 5.0
_SHOWN_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class WriteOptions:
    """How the files of one rank are written; the attributes of these names of a
    :class:`FileSystemWriter`."""

    thread_count: int
    bytes_per_file: int
    single_file_per_rank: bool
    separation_hint: str | None
    max_host_bytes: int | None
    direct_io: bool | str
    sync_files: bool
    progress: ProgressOption

    @classmethod
    def of(cls, writer: Any) -> WriteOptions:
        """Those of a writer."""
        return cls(**{field.name: getattr(writer, field.name) for field in dataclasses.fields(cls)})

    def __getstate__(self) -> dict[str, Any]:
        # Bars and callbacks belong to the process of the caller.
        return self.__dict__ | {"progress": None}


class RankWrite:
    """One rank's write; see the head of this file.

    Args:
        sources: of a snapshot; None: ``run`` keeps its caller waiting.
        background: how the engine's threads behave; None: as those that somebody waits for.
        quiet_stagers: whether the threads that copy from the sources are as quiet as the writers.
        ranks: how many save together, for the share of the host's memory.
        advice: what to do about a source that was written to, for the error.
        trace: record each stretch of work.
        children: gets the results as well, for children that are forked meanwhile.
        staged: becomes the attribute.

    Attributes:
        staged: done when the sources may change; fails where the write does before.
        begun: when the engine began, by ``time.perf_counter()``; None before.
        timing: of the engine at the end; see ``_C.Save.timing``. None where it has not begun.
        stretches: of work, at the end of a write that was traced; see ``_C.Save.trace``.
    """

    def __init__(
        self,
        sources: Watched | None = None,
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
        #: Called once while the engine writes, by the thread that waits for it.
        self.meanwhile: Callable[[], None] = lambda: None
        self._save: _C.Save | None = None
        self._progress = Progress(0, 0, 0)
        self._is_cancelled = False
        self._lock = threading.Lock()
        self._changed: list[str] | None = None
        # The engine has begun, or will not.
        self._started = threading.Event()
        self._ready = record_events(sources.devices if sources is not None else ())

    # --- by the thread that writes ---------------------------------------------------------------

    @contextlib.contextmanager
    def device_streams(self) -> Iterator[None]:
        """A block whose work on devices, if any, runs beside training and after its past."""
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
        names: list[str],
        values: list[Any],
        title: str,
        rank: int | None,
    ) -> Written:
        """Writes tensors and bytes, fsynced, and waits for the end.

        Args:
            prefix: of the file names, ``__{rank}_``.
            names: fully qualified names, one for each value.
            values: plain tensors (see ``_C.is_plain``) or bytes-like objects. Of a snapshot the
                list is emptied as soon as they have been copied.
            title: of the bar that shows progress.
            rank: this process's, which decides whether there is a bar.

        Raises:
            OSError: a system call failed. Every file of this write has been removed.
            SourceChanged: a source was written to before it was copied.
        """
        is_snapshot = self._sources is not None
        if not is_snapshot:
            _wait_for_devices(values)
        engine_options = self._engine_options()
        place = Place.of(directory)
        save = _C.start_save(
            directory,
            prefix,
            names,
            values,
            buckets=options.thread_count,
            bytes_per_bucket=options.bytes_per_file,
            file_per_item=not options.single_file_per_rank,
            separation_hint=options.separation_hint or "",
            max_host_bytes=options.max_host_bytes
            or (engine_options.max_host_bytes if engine_options else 0),
            direct_io=options.direct_io,
            sync=options.sync_files,
            background=engine_options,
        )
        self._save = save
        try:
            with Reporter(options.progress, title, rank, save.progress()[0]) as shown:

                def show() -> None:
                    shown.update(self.progress())

                # Waking up shows progress and lets Ctrl-C in, which only reaches the main thread.
                rest = _SHOWN_SECONDS if shown.active or not is_snapshot else _REST_SECONDS
                if is_snapshot:
                    _core.fault_point("engine has begun", directory.path)
                    self._has_begun(save)
                    _wait_for(save.wait_staged, rest, show)
                    values.clear()
                    save.release_sources()
                    _core.fault_point("sources are copied", directory.path)
                    self._sources_copied()
                self.meanwhile()
                _wait_for(save.wait, rest, show)
                _core.fault_point("files are written", directory.path)
        except BaseException:
            # The error holds this frame and with it `save`, so dropping it would not end it.
            _give_up(save, directory)
            raise
        finally:
            self._has_ended(save)
            # An error that is kept keeps this frame, but not the directory open.
            del directory
        with no_gc():
            return Written(save.results(), place)

    def end(self, error: BaseException | None) -> None:
        """Lets go of the sources, and of who waits: the write has ended, or will not begin.

        Args:
            error: why it has failed, if it has.
        """
        if self._sources is not None:
            self._sources.release()
        self._ready = []
        self._started.set()
        if error is not None and not self.staged.done():
            self.staged.set_exception(error)

    # --- by any thread ---------------------------------------------------------------------------

    def wait_staged(self) -> None:
        """Returns when the sources may change, be it that the write has failed."""
        wait_quietly(self.staged)

    def progress(self) -> Progress:
        """Bytes so far."""
        save = self._save
        if save is not None:
            self._progress = Progress(*save.progress()[:3])
        return self._progress

    def moved(self) -> int:
        """Grows for as long as anything moves."""
        progress = self.progress()
        return progress.bytes_staged + progress.bytes_done

    def cancel(self) -> None:
        """Makes it fail, and leave no file, if it has not ended."""
        self._is_cancelled = True
        # Its thread lets go of it at the end.
        save = self._save
        if save is not None:
            save.cancel()

    def state(self, where: str, prefix: str) -> str:
        """What it is doing, for a message: files, phase, bytes.

        Args:
            where: the directory, and ``prefix`` of the files, as a reader knows them.
        """
        save = self._save
        if save is None:
            return f"files {prefix}* in {where}: before the first byte"
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
        """Has the current streams of the sources' devices wait for the copies.

        Args:
            has_ended: whether the save has.

        Returns:
            False where the caller has to wait itself: there are no devices, or the streams do not
            wait, because a CUDA graph is being captured on one for example.
        """
        if not self._ready:
            return False
        while not self._started.wait(1.0):
            if has_ended():
                return True
        save = self._save
        if save is None:
            return True
        # An error of the save's is told by the save itself.
        with contextlib.suppress(Exception), self._lock:
            while not save.wait_submitted(1.0):
                pass
            for _event, device in self._ready:
                stream = torch.cuda.current_stream(device).cuda_stream
                save.make_stream_wait(device.index, stream)
            # What the stream does from now on comes after the copies, on the device.
            if self._changed is None and self._sources is not None:
                self._changed = self._sources.changed()
            return True
        return False

    # --- private ---------------------------------------------------------------------------------

    def _engine_options(self) -> EngineOptions | None:
        if self._background is None:
            return None
        is_snapshot = self._sources is not None
        return EngineOptions(
            self._background,
            snapshot=is_snapshot,
            quiet_stagers=self._quiet_stagers,
            max_host_bytes=default_snapshot_bytes(self._ranks) if is_snapshot else 0,
            ready=[(device.index, event.cuda_event) for event, device in self._ready],
            trace=self._trace,
            children=self._children,
        )

    def _has_begun(self, save: _C.Save) -> None:
        self.begun = time.perf_counter() - save.elapsed()
        if self._is_cancelled:
            save.cancel()
        self._started.set()

    def _sources_copied(self) -> None:
        assert self._sources is not None
        with self._lock:
            changed = self._sources.changed() if self._changed is None else self._changed
        self._sources.release()
        if changed:
            raise source_changed(changed, self._advice)
        self.staged.set_result(None)

    def _has_ended(self, save: _C.Save) -> None:
        self.progress()
        self.timing = save.timing()
        if self._trace:
            self.stretches = list(save.trace())
        # The pool's chunks are free; the session's own memory may go, too.
        self._save = None


def wait_quietly(future: Future[Any]) -> None:
    """Waits for the end, whatever it is, and leaves an error unseen."""
    Future.exception(future)


def _wait_for_devices(values: list[Any]) -> None:
    """Lets the streams that produce CUDA tensors finish before other streams read them."""
    if not torch.cuda.is_available():
        return
    devices = {v.device for v in values if isinstance(v, torch.Tensor) and v.is_cuda}
    for device in devices:
        torch.cuda.current_stream(device).synchronize()


def _give_up(save: _C.Save, directory: OpenDirectory) -> None:
    """Ends a save and leaves none of its files."""
    save.cancel()
    try:
        while not save.wait(1.0):
            pass
    except Exception:
        return  # and what ends so has removed its files
    _core.remove_files(directory, save.file_names)


def _wait_for(wait: Callable[[float], bool], rest: float, between: Callable[[], None]) -> None:
    while not wait(rest):
        between()
    between()
