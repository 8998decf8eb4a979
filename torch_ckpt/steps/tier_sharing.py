"""Copies files of other hosts to the disk of this host, so that no file is on one disk only."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress

from torch_ckpt import _core
from torch_ckpt._base.log import LOGGER
from torch_ckpt.checkpoint.directory import OpenDirectory, share_or_warn
from torch_ckpt.checkpoint.publishing import write_new_file
from torch_ckpt.errors import Corrupt
from torch_ckpt.steps.host_step import HostStep
from torch_ckpt.steps.local import LocalSteps
from torch_ckpt.steps.local_copy import Holder
from torch_ckpt.steps.tier_files import Files, first_fault
from torch_ckpt.steps.tier_peers import PeerFiles

# Block in which a thread waits for a disk, or for the limit of the rate.
Busy = Callable[[], AbstractContextManager[None]]

#: Reads a file in pieces.
Pieces = Callable[[Files, str, Busy], Iterator[memoryview]]


def assign_to_hosts(
    files: Mapping[int, Mapping[str, int]], hosts: Sequence[tuple[object, ...]], peers: int
) -> list[dict[str, Holder]]:
    """Assigns copies of files, so that each file is on ``1 + peers`` hosts, if there are as many.

    A host copies the files of the hosts before it, in the order of their first ranks. Its ranks
    share the files.

    Args:
        files: sizes of the files of a save that the rank's host has, by rank.
        hosts: identifies the host of each rank.

    Returns:
        For each rank, the files that it copies, and the ranks that serve them.
    """
    ranks_of: dict[tuple[object, ...], list[int]] = {}
    for rank in files:
        ranks_of.setdefault(hosts[rank], []).append(rank)
    having_save = [*ranks_of.values()]
    assigned: list[dict[str, Holder]] = [{} for _ in hosts]
    loads = [0] * len(hosts)
    of_hosts = [files[ranks[0]] for ranks in having_save]
    sizes = {name: count for of_host in of_hosts for name, count in of_host.items()}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        having = [number for number, of_host in enumerate(of_hosts) if name in of_host]
        others = [(having[0] + step) % len(having_save) for step in range(1, len(having_save))]
        lacking = [number for number in others if number not in having]
        servers = having_save[having[0]]
        for number in lacking[: max(0, 1 + peers - len(having))]:
            rank = min(having_save[number], key=loads.__getitem__)
            server = servers[having_save[number].index(rank) % len(servers)]
            assigned[rank][name] = Holder(server, sizes[name])
            loads[rank] += sizes[name]
    return assigned


class Progress:
    """The progress of a copy, in one thread."""

    def __init__(self) -> None:
        self._bytes = 0
        self._is_busy = False

    def moved(self) -> int:
        """Returns a number that changes while the copy makes progress."""
        return self._bytes + (time.monotonic_ns() if self._is_busy else 0)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Block that counts as progress."""
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    def counted(self, pieces: Iterator[memoryview]) -> Iterator[memoryview]:
        """Yields the pieces, and counts their bytes."""
        for piece in pieces:
            self._bytes += len(piece)
            yield piece
            del piece


class Sharing:
    """The copy of files of other hosts to the disk of this host.

    Args:
        disk: the steps of this host.
        save: the step, and the digest of its metadata.
        names: the files.
        others: the files on other hosts.
        pieces: reads them.
    """

    def __init__(
        self,
        disk: LocalSteps,
        save: tuple[int, bytes],
        names: Sequence[str],
        others: PeerFiles,
        pieces: Pieces,
    ) -> None:
        self._disk = disk
        self._step, self._digest = save
        self._names = names
        self._others = others
        self._pieces = pieces
        self._progress = Progress()

    def run(self) -> bool:
        """Copies the files. If that fails, logs a warning, keeps the complete files, and returns
        False."""
        if not self._names:
            return True
        try:
            with closing(HostStep(self._disk, self._step)) as found:
                # So that no other process deletes the step.
                share_or_warn(found.directory)
                try:
                    self._copy_to(found)
                finally:
                    found.directory.sync()
        except (OSError, Corrupt) as error:
            LOGGER.warning(
                "step %d: the disk of this host does not have the files of other hosts: %s",
                self._step,
                error,
            )
            return False
        return True

    def moved(self) -> int:
        """Returns a number that changes while the copy makes progress."""
        return self._progress.moved()

    def stop(self) -> None:
        """Ends reads from other hosts. May be called from any thread."""
        self._others.close()

    # --- private ---------------------------------------------------------------------------------

    def _copy_to(self, found: HostStep) -> None:
        if found.digest != self._digest:
            raise Corrupt(f"{found.path} is another save now")
        progress = self._progress
        for name in self._names:
            pieces = progress.counted(self._pieces(self._others, name, progress.busy))
            size = self._others.size(name)
            copy_to_directory(found.directory, name, pieces, size, progress.busy)
            with progress.busy():
                fault = first_fault(found.directory, found.index, [name])
            if fault:
                with suppress(OSError):
                    found.directory.remove(name)
                raise Corrupt(f"{fault}. Another host has sent this file")


def copy_to_directory(
    directory: OpenDirectory, name: str, pieces: Iterator[memoryview], bytes: int, busy: Busy
) -> None:
    """Copies a file to a directory, where it appears once it is complete. Does nothing if it is
    there.

    Args:
        pieces: the contents.
        bytes: size of the contents.
        busy: block in which the function waits for the disk.

    Raises:
        OSError: the file cannot be written.
    """
    with suppress(FileNotFoundError):
        if directory.length_of(name) == bytes:
            return
    # No process renames the file of another, which may be incomplete.
    temporary = f".{name}.{secrets.token_hex(4)}.part"
    try:
        for other in directory.names():
            if re.fullmatch(rf"\.{re.escape(name)}(\.[0-9a-f]{{8}})?\.part", other):
                directory.remove(other)  # of a copy that was killed
        write_new_file(directory, temporary, pieces, bytes, busy=busy)
        _core.fault_point("rename", os.path.join(directory.path, name))
        os.rename(temporary, name, src_dir_fd=directory.fd, dst_dir_fd=directory.fd)
    except BaseException:
        with suppress(OSError):
            directory.remove(temporary)
        raise
