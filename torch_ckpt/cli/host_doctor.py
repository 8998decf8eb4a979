"""``torchrun ... -m torch_ckpt doctor DIR``: checks how several hosts see one directory.

Rank 0 makes a change in a temporary directory inside the examined one. Then the other ranks look
for the change, all at the same time. Each check is one such exchange. All files are deleted at the
end.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any, TypeVar

import torch.distributed as dist

from torch_ckpt import _core
from torch_ckpt._base.formatting import first_line, plural
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.shared_directory import (
    NETWORK_SECONDS,
    PAUSE_SECONDS,
    View,
    create_if_absent,
    wait_for,
)
from torch_ckpt.cli.diagnosis import Diagnosis, median_ms_of, seconds_of
from torch_ckpt.errors import CheckpointError
from torch_ckpt.stores.probe import Check

T = TypeVar("T")

#: Bytes that each rank writes in the measurement of the bandwidth.
DEFAULT_MEASURED = 64 << 20

_BLOCK_BYTES = 8 << 20


@contextmanager
def process_group() -> Iterator[None]:
    """Initializes the process group of the ranks that torchrun has started, during a block.

    Raises:
        CheckpointError: the process group could not be initialized, or a call of it failed.
    """
    try:
        dist.init_process_group("gloo")
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but the process group could not be "
            f"initialized: {first_line(error)}. Start all ranks with torchrun, or unset WORLD_SIZE "
            "to examine the directory on this host only"
        ) from error
    try:
        yield
    except RuntimeError as error:  # torch's DistError, for example
        raise CheckpointError(f"the examination failed: {first_line(error)}") from error
    finally:
        dist.destroy_process_group()


def diagnose_hosts(
    path: str | os.PathLike[str], *, measured_bytes: int = DEFAULT_MEASURED
) -> Diagnosis | None:
    """Examines a directory from all ranks of the process group. Every rank calls this function.

    Args:
        path: an existing directory that the hosts share.
        measured_bytes: number of bytes that each rank writes for the bandwidth.

    Returns:
        The report on rank 0; None on the other ranks.

    Raises:
        CheckpointError: a rank has another directory at this path, or cannot open it.
        OSError: the directory does not exist or is not writable.
    """
    with closing(OpenDirectory(path)) as parent, _scratch(parent) as directory:
        return _examine(os.fspath(path), directory, measured_bytes)


@contextmanager
def _scratch(parent: OpenDirectory) -> Iterator[OpenDirectory]:
    """Creates a directory on rank 0, and opens it on all ranks."""
    sent: list[Any] = [None, None, None]
    if dist.get_rank() == 0:
        sent = [f".torch-ckpt-doctor-{os.urandom(8).hex()}", View.of(parent), None]
        try:
            os.mkdir(sent[0], dir_fd=parent.fd)
        except OSError as error:
            # Otherwise the other ranks would wait for this one.
            sent[2] = error
    dist.broadcast_object_list(sent)
    name, first, failure = sent
    if failure is not None:
        raise OSError(failure.errno, failure.strerror, parent.path)
    try:
        with closing(_open_on_all(parent, name, first)) as opened:
            yield opened
            dist.barrier()
    finally:
        if dist.get_rank() == 0:
            with suppress(OSError), closing(parent.open_directory(name)) as made:
                _core.remove_files(made, made.names())
                os.rmdir(name, dir_fd=parent.fd)


def _open_on_all(parent: OpenDirectory, name: str, first: View) -> OpenDirectory:
    opened, failure = None, ""
    try:
        opened = wait_for(lambda: parent.open_directory(name), parent, first, dist.get_rank())
    except (CheckpointError, OSError) as error:
        failure = str(error)
    # Otherwise the other ranks would wait for this one.
    failures = [text for text in _from_all(failure) if text]
    if failures or opened is None:
        raise CheckpointError(failures[0])
    return opened


def _examine(path: str, directory: OpenDirectory, measured_bytes: int) -> Diagnosis | None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    hosts = sorted(set(_from_all(socket.gethostname())))
    file_system = View.of(directory).file_system
    report = Diagnosis(path, {"file_system": file_system, "hosts": hosts, "ranks": ranks})
    fsync = median_ms_of(lambda: _write(directory, f"fsync{rank}", 4096))
    report.measured["fsync_of_the_slowest_rank_ms"] = max(_from_all(fsync))
    dist.barrier()
    seconds = max(_from_all(seconds_of(lambda: _write(directory, f"b{rank}", measured_bytes))))
    report.measured["writes_of_all_ranks_bytes_per_second"] = ranks * measured_bytes / seconds
    report.checks += [
        _check_new_file(directory),
        _check_listing(directory),
        _check_replaced_file(directory),
        _check_locks(directory),
        _check_creation(directory),
        _check_rename(directory),
    ]
    return report if rank == 0 else None


def _write(directory: OpenDirectory, name: str, count: int) -> None:
    """Writes and fsyncs a file. Its bytes are random, because some file systems compress data."""
    block = os.urandom(min(_BLOCK_BYTES, count))
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666, dir_fd=directory.fd)
    with closing(os.fdopen(fd, "wb", 0)) as file:
        written = 0
        while written < count:
            written += file.write(block[: count - written])
        os.fsync(fd)


# --- checks --------------------------------------------------------------------------------------


def _check_new_file(directory: OpenDirectory) -> Check:
    return _visible(
        "other ranks see a new file",
        lambda: _core.publish_contents(directory, "new", b"new"),
        lambda: "" if _read(directory, "new") == b"new" else "a file without its contents",
        "Saves and loads wait for files that are missing",
    )


def _check_listing(directory: OpenDirectory) -> Check:
    directory.names()  # a client may keep this listing
    dist.barrier()
    return _visible(
        "other ranks list a new file",
        lambda: _core.publish_contents(directory, "listed", b""),
        lambda: "" if "listed" in directory.names() else "a listing without the file",
        "Other hosts list a new step only after this time",
    )


def _check_replaced_file(directory: OpenDirectory) -> Check:
    old, new = b"old contents", b"new"

    def replace(contents: bytes) -> Callable[[], None]:
        return lambda: _core.publish_contents(directory, "replaced", contents)

    def look() -> str:
        names = {new: "", old: "the former contents"}
        return names.get(_read(directory, "replaced"), "a mixture of both contents")

    _in_turn(replace(old), lambda: _time_until(lambda: look().replace("the former contents", "")))
    return _visible(
        "other ranks read a file that was replaced",
        replace(new),
        look,
        "Loads read files again that are missing or look damaged",
    )


def _check_locks(directory: OpenDirectory) -> Check:
    def hold() -> None:
        if not directory.try_lock_exclusive():
            raise OSError(errno.ENOLCK, "rank 0 could not lock a directory", directory.path)

    got = sum(_in_turn(hold, directory.try_lock_exclusive))
    return Check.of(
        "locks exclude other ranks",
        not got,
        "flock",
        f"{plural(got, 'rank')} got the lock of rank 0. The leases of managers exclude other jobs "
        "without locks. Do not let two jobs save to the same checkpoint directory",
    )


def _check_creation(directory: OpenDirectory) -> Check:
    def create() -> bool:
        return create_if_absent(directory, "created")

    created = sum(_in_turn(create, create))
    return Check.of(
        "only one rank creates a file",
        not created,
        "O_EXCL",
        f"{plural(created, 'rank')} created a file that existed, so a lease does not exclude other "
        "jobs. Start only one job for each root",
    )


def _check_rename(directory: OpenDirectory) -> Check:
    def publish() -> bool:
        with suppress(FileExistsError):
            _core.publish_contents(directory, "renamed", b"", replace=False)
            return True
        return False

    replaced = sum(_in_turn(publish, publish))
    return Check.of(
        "a rename can fail if the name exists",
        not replaced,
        "tried",
        f"{plural(replaced, 'rank')} replaced a file, so a save that must not replace a checkpoint "
        "may replace one that another job saves at the same time",
    )


# --- exchanges -----------------------------------------------------------------------------------


def _from_all(value: T) -> list[T]:
    """Returns the value of each rank, on all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _in_turn(first: Callable[[], object], others: Callable[[], T]) -> list[T]:
    """Acts on rank 0, then on the other ranks. Returns the results of the other ranks."""
    result = None
    if dist.get_rank() == 0:
        first()
    dist.barrier()
    if dist.get_rank() != 0:
        result = others()
    found: list[Any] = _from_all(result)
    return found[1:]


def _visible(what: str, change: Callable[[], object], look: Callable[[], str], note: str) -> Check:
    """Checks how soon the other ranks see a change of rank 0.

    Args:
        look: returns "" if a rank sees the change, and otherwise what the rank sees.
        note: the consequence of a delay.
    """
    seconds, problem = max(_in_turn(change, lambda: _time_until(look)))
    if seconds > NETWORK_SECONDS:
        return Check(what, "fails", f"not within {NETWORK_SECONDS:.0f} s: {problem}")
    if not problem:
        return Check(what, "holds", "at once")
    return Check(what, "holds", f"after {seconds:.1f} s; until then, {problem}. {note}")


def _time_until(look: Callable[[], str]) -> tuple[float, str]:
    """Returns the seconds until a rank sees a change, and what it saw before."""
    begun, problem = time.monotonic(), ""
    while True:
        try:
            found = look()
        except OSError as error:
            found = errno.errorcode.get(error.errno or 0, "an error")
        seconds = time.monotonic() - begun
        if not found or seconds > NETWORK_SECONDS:
            return seconds, found or problem
        problem = found
        time.sleep(PAUSE_SECONDS)


def _read(directory: OpenDirectory, name: str) -> bytes:
    directory.refresh(name)  # as loads do
    with open(name, "rb", opener=directory.open_for_read) as stream:
        return stream.read()
