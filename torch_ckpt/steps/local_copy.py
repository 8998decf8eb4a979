"""Describes the steps that are on the disks of hosts (steps/tier.py)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

#: Epoch, time and run of a save. The newer save of a step is greater.
SaveKey = tuple[float, float, str]


class _Saved(Protocol):
    """A complete step; see :class:`torch_ckpt.steps.StepInfo`."""

    @property
    def epoch(self) -> int | None: ...

    @property
    def saved_at(self) -> float | None: ...

    @property
    def run(self) -> str: ...


class LocalCopy(NamedTuple):
    """Describes the part of a step that is on the disk of one host.

    Attributes:
        digest: of the metadata, which identifies the save.
        epoch, run, saved_at: see :class:`torch_ckpt.steps.StepInfo`.
        files: sizes of the files that the host has: the metadata, and data files.
        of_all: number of such files on all hosts together.
        is_published: True if the step has been copied to the root.
    """

    step: int
    digest: bytes
    epoch: int | None
    run: str
    saved_at: float | None
    files: dict[str, int]
    of_all: int
    is_published: bool

    @property
    def has_all(self) -> bool:
        """True if the host has the files of all hosts."""
        return len(self.files) == self.of_all


class Holder(NamedTuple):
    """A rank whose host has a file, and the size of the file."""

    rank: int
    bytes: int


class SaveOnDisks:
    """The copies of one save on the disks of several hosts.

    Args:
        copies: the copies that ranks have found on the disks of their hosts.

    Attributes:
        step, digest, key: identify the save.
        files: sizes of the files that the rank's host has, by rank.
        holders: a rank whose host has the file, by file. The ranks have about as many bytes.
        is_complete: True if each file is on one of the hosts.
        is_published: True if a host has noted that the step has been copied to the root.
        is_noted: True if all of these hosts have noted it.
    """

    def __init__(self, copies: Sequence[tuple[int, LocalCopy]]) -> None:
        _rank, one = copies[0]
        self.step, self.digest, self.key = one.step, one.digest, key_of(one)
        self.one = one
        self.files = {rank: copy.files for rank, copy in copies}
        self.holders = assign_files(self.files)
        self.is_complete = len(self.holders) == one.of_all
        self.is_published = any(copy.is_published for _rank, copy in copies)
        self.is_noted = all(copy.is_published for _rank, copy in copies)


def key_of(step: _Saved) -> SaveKey:
    """Identifies the save of a step."""
    # A user has made a step without an epoch.
    epoch = math.inf if step.epoch is None else step.epoch
    return epoch, step.saved_at or 0.0, step.run


def digest_of(data: bytes) -> bytes:
    """Returns the digest of the contents of a metadata file."""
    return hashlib.blake2b(data, digest_size=16).digest()


def saves_on_disks(of_ranks: Sequence[Sequence[LocalCopy]]) -> list[SaveOnDisks]:
    """Groups the copies of all ranks' hosts by save, the oldest save first."""
    groups: dict[tuple[int, bytes], list[tuple[int, LocalCopy]]] = {}
    for rank, copies in enumerate(of_ranks):
        for copy in copies:
            groups.setdefault((copy.step, copy.digest), []).append((rank, copy))
    return sorted(map(SaveOnDisks, groups.values()), key=lambda save: (save.key, save.step))


def assign_files(of_ranks: Mapping[int, Mapping[str, int]]) -> dict[str, Holder]:
    """Assigns each file to one of the ranks that have it. The ranks get about as many bytes.

    Args:
        of_ranks: the sizes of the files that each rank has.
    """
    having: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for rank, files in of_ranks.items():
        sizes.update(files)
        for name in files:
            having.setdefault(name, []).append(rank)
    loads = dict.fromkeys(of_ranks, 0)
    holders = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = min(having[name], key=loads.__getitem__)
        loads[rank] += sizes[name]
        holders[name] = Holder(rank, sizes[name])
    return holders
