"""The part of a step that is on the disk of one host (steps/tier.py)."""

from __future__ import annotations

import os
from contextlib import closing, suppress
from functools import cached_property

from torch_ckpt import _core
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.index import MAX_METADATA_BYTES, METADATA_NAME, decode_index
from torch_ckpt.checkpoint.marker import MARKER_NAME, MOST_MARKER_BYTES, parsed_marker
from torch_ckpt.steps.local import LocalSteps
from torch_ckpt.steps.local_copy import LocalCopy, digest_of
from torch_ckpt.steps.step_store import info_of
from torch_ckpt.steps.tier_files import faulty_files

#: File in a host's directory of a step that has been copied to the root.
PUBLISHED_NAME = ".published"


class HostStep:
    """The directory of a complete step on the disk of this host. Closed by its owner.

    Raises:
        FileNotFoundError: the step is not complete on this host.
        OSError: the step cannot be read.
    """

    def __init__(self, disk: LocalSteps, step: int) -> None:
        self.directory = OpenDirectory(disk.path_of(step))
        self.path = self.directory.path
        try:
            self.metadata = self.read(METADATA_NAME, MAX_METADATA_BYTES)
            self.marker = self.read(MARKER_NAME, MOST_MARKER_BYTES)
        except BaseException:
            self.directory.close()
            raise
        self.digest = digest_of(self.metadata)

    def read(self, name: str, limit: int) -> bytes:
        """Reads the first bytes of a file."""
        with open(name, "rb", opener=self.directory.open_for_read) as file:
            return file.read(limit)

    @cached_property
    def index(self) -> _core.CheckpointIndex:
        """The decoded metadata."""
        return decode_index(self.metadata, os.path.join(self.path, METADATA_NAME))

    def named(self) -> list[str]:
        """Returns the names of all data files of the step, on any host."""
        return self.index.files()

    def files(self) -> dict[str, int]:
        """Returns the sizes of the data files that this host has."""
        present = set(self.directory.names())
        return {name: self.directory.length_of(name) for name in self.named() if name in present}

    def close(self) -> None:
        self.directory.close()


def drop(disk: LocalSteps, step: int, digest: bytes) -> None:
    """Deletes a save from the disk of this host. Does nothing if a process uses the step, or if the
    disk has another save of it.

    Raises:
        OSError: the step cannot be read or deleted.
    """
    with suppress(FileNotFoundError):
        with closing(HostStep(disk, step)) as found:
            is_same = found.digest == digest
        if is_same:
            disk.delete(step)


def describe(disk: LocalSteps, step: int, *, verify: bool) -> LocalCopy:
    """Describes a complete step on the disk of this host.

    Args:
        verify: read the files, and leave out those that are damaged.

    Raises:
        CheckpointError, OSError: the step cannot be read.
    """
    with closing(HostStep(disk, step)) as found:
        info = info_of(step, found.path, parsed_marker(found.marker), False, lambda: 0)
        files = found.files()
        if verify:
            for name in faulty_files(found.directory, found.index):
                files.pop(name, None)
        return LocalCopy(
            step,
            found.digest,
            info.epoch,
            info.run,
            info.saved_at,
            files | {METADATA_NAME: len(found.metadata)},
            len(found.named()) + 1,
            found.directory.contains(PUBLISHED_NAME),
        )
