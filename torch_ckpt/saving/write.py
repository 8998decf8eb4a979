"""Writes one rank's files with the engine, and waits for the end.

Saves, DCP's writer and Megatron's queues write in this way. csrc/torch/tensor_save.h has the steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from torch_ckpt import _C, _core
from torch_ckpt._base.cycle_collector import no_gc
from torch_ckpt._base.progress import Progress, reporting
from torch_ckpt.checkpoint.directory import DirectoryIdentity, OpenDirectory
from torch_ckpt.options import Background, WriteOptions
from torch_ckpt.saving import host_memory
from torch_ckpt.saving.snapshots import source_changed
from torch_ckpt.stores.folder import StreamFolder

# Seconds between two checks of a write, without and with a progress bar.
_REST_SECONDS = 5.0
_SHOWN_SECONDS = 0.1

#: CUDA events and their devices. Work on a device is complete after the event of the device.
Events = Sequence[tuple[torch.cuda.Event, torch.device]]


@dataclasses.dataclass
class Written:
    """The result of one rank's write.

    Attributes:
        files: the files, with the location and CRC-32 of each item.
        directory: identity of the directory that contains the files.
        checksums: see :meth:`SaveState.checksums`. Set if the plan requests any.
    """

    files: _core.WrittenFiles
    directory: DirectoryIdentity
    # Most plans request none. Then the attribute is not in the message to the coordinator.
    checksums: bytes = dataclasses.field(default=b"", init=False)


def write_files(
    save: _C.Save,
    directory: OpenDirectory | StreamFolder,
    prefix: str,
    sources: _C.SaveSources,
    options: WriteOptions,
    *,
    title: str,
    rank: int | None,
    is_snapshot: bool = False,
    background: Background | None = None,
    low_priority_copies: bool = True,
    ready: Events = (),
    ranks: int = 1,
    children: _core.ProcessChannel | None = None,
    advice: str = "",
    on_staged: Callable[[], None] | None = None,
) -> Written:
    """Writes tensors and bytes, fsyncs the files, and waits for the end.

    Args:
        save: the write, which has not started.
        directory: the directory, or the objects, of the checkpoint.
        prefix: prefix of the file names, ``__{rank}_``.
        sources: the values to write. This function empties the sources.
        title: title of the progress bar.
        rank: the rank of this process, which decides whether to show a bar.
        is_snapshot: stage as far ahead of the disk as the memory budget allows. ``save`` watches
            the sources, which may change as soon as they are staged.
        background: priorities of the engine's threads; None: the priorities of a foreground save.
        low_priority_copies: give the threads that copy from the sources the low priority of the
            writers, too.
        ready: the sources are complete after these events.
        ranks: number of ranks that save together, which share the host's memory.
        children: channel that passes the results to children forked during the write, too.
        advice: what to do about a source that was written to too early, for the error.
        on_staged: called once when the sources may change.

    Raises:
        OSError: a system call failed. All files of this write were removed.
        SourceChanged: a source was written to before it was copied.
    """
    max_host_bytes = options.max_host_bytes or 0
    if not is_snapshot:
        # Other streams read the CUDA tensors that the current streams compute.
        for device in sources.devices():
            torch.cuda.current_stream(device).synchronize()
    elif max_host_bytes:
        host_memory.reserve.limit(max_host_bytes)
    else:
        max_host_bytes = host_memory.default_snapshot_bytes(ranks)
    identity = DirectoryIdentity.of(directory)
    _core.fault_point("engine begins", directory.path)
    save.start(
        directory,
        prefix,
        sources,
        buckets=options.files,
        bytes_per_bucket=options.bytes_per_file,
        file_per_item=not options.single_file_per_rank,
        separation_hint=options.separation_hint or "",
        max_host_bytes=max_host_bytes,
        direct_io=options.direct_io,
        sync=options.sync_files,
        snapshot=is_snapshot,
        background=background,
        low_priority_copies=low_priority_copies,
        ready=[(device.index, event.cuda_event) for event, device in ready],
        children=children,
    )
    try:
        if is_snapshot:
            _core.fault_point("engine has begun", directory.path)
        with (
            reporting(options.progress, title, rank, save.progress()[0]) as show,
            directory.own_errors() if isinstance(directory, StreamFolder) else nullcontext(),
        ):
            # Wake up regularly to show progress and to let Ctrl-C in, which only reaches the main
            # thread.
            on_wait = None if show is None else lambda: show(progress_of(save))
            rest = _SHOWN_SECONDS if show is not None or not is_snapshot else _REST_SECONDS
            changed = save.run(on_staged, on_wait, rest)
        if changed:
            raise source_changed(changed, advice)
        _core.fault_point("files are written", directory.path)
    except BaseException:
        # The error refers to this frame and thereby to `save`, so dropping `save` would not end it.
        names = save.cancel_and_wait()
        if isinstance(directory, StreamFolder):
            directory.remove_written()
        else:
            _core.remove_files(directory, names)
        save.finish()
        # A kept error must not keep the directory open.
        del directory
        raise
    with no_gc():
        return Written(save.finish(), identity)


def progress_of(save: _C.Save) -> Progress:
    """Returns the progress of a write in bytes."""
    return Progress(*save.progress()[:3])


def describe_progress(save: _C.Save, where: str, prefix: str) -> str:
    """Describes what a write is doing, for a message: files, phase and bytes.

    Args:
        where: the directory, as the user knows it.
        prefix: prefix of the file names, as the user knows them.
    """
    planned, staged, written, files, done = save.progress()
    if not files:
        return f"files {prefix}* in {where}: no bytes written yet"
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
