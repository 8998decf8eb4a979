"""What one rank reads of a checkpoint, and where it goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from torch_ckpt.checkpoint.files import lies_beneath, outside

#: One tensor to read: name, file number, offset and length of its record in bytes, dtype and shape
#: of the stored tensor, offsets and lengths of the wanted region (empty: all of it), target.
Row = tuple[
    str,
    int,
    int,
    int,
    torch.dtype,
    "tuple[int, ...]",
    "tuple[int, ...]",
    "tuple[int, ...]",
    torch.Tensor,
]


#: One bytes item to read: name, file number, offset and length of its record in bytes.
ByteRow = tuple[str, int, int, int]


class Reading:
    """What one rank reads, and where it goes.

    Attributes:
        planner: who gets objects, and tensors where it wants to see them.
        files: names relative to the checkpoint's directory, with the numbers that rows use.
        rows: tensors.
        byte_items: objects, and where they are stored.
        transformed: what torch's own code reads, since a stream transform was at work.
        to_commit: tensors that the planner wants to see.
    """

    def __init__(self, planner: LoadPlanner) -> None:
        self.planner = planner
        self.files: dict[str, int] = {}
        self.rows: list[Row] = []
        self.byte_items: list[tuple[ReadItem, _StorageInfo]] = []
        self.transformed: list[ReadItem] = []
        self.to_commit: list[tuple[ReadItem, torch.Tensor]] = []

    def number(self, file: str, name: str) -> int:
        """The number of a file, in which a tensor of that name lies.

        Raises:
            Unsafe: it lies outside of the checkpoint's directory.
        """
        if file not in self.files:
            if not lies_beneath(file):
                raise outside(name, file)
            self.files[file] = len(self.files)
        return self.files[file]

    def add(self, other: Reading) -> None:
        """Adds what another one reads, for a planner of its own no more."""
        names = list(other.files)
        self.rows.extend(
            (row[0], self.number(names[row[1]], row[0]), *row[2:]) for row in other.rows
        )
        self.byte_items.extend(other.byte_items)
        self.transformed.extend(other.transformed)
        self.to_commit.extend(other.to_commit)


class BytesMoved:
    """How many bytes a load has moved: the sign of life of a rank that reads.

    Called, it returns a number that changes for as long as the load moves.
    """

    def __init__(self) -> None:
        self._bytes = 0
        self._is_elsewhere = False

    def __call__(self) -> int:
        return time.monotonic_ns() if self._is_elsewhere else self._bytes

    def add(self, count: int) -> None:
        """Counts bytes that have been moved."""
        self._bytes += count

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Within it others' code reads or waits for ranks, and does not say how far it is."""
        self._is_elsewhere = True
        try:
            yield
        finally:
            self._is_elsewhere = False
