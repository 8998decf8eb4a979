"""Decides whether the ranks of a machine read through the page cache.

A direct read bypasses the page cache, which is faster if one rank wants the bytes. If several ranks
of a machine want the same bytes, as with DDP, the disk must send them once for each rank. Through
the page cache, the disk sends them once.

1. Each rank sends its machine and the number of bytes that it reads.
2. The coordinator adds up the bytes of each machine. If the ranks of a machine together read at
   least ``SHARED`` times the bytes of the checkpoint, they must want the same bytes.
3. These ranks use the page cache, unless the reader's ``direct_io`` is True.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

import torch
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from torch_ckpt import _core
from torch_ckpt._base.machine import boot_id

#: Bytes that the ranks of a machine read, relative to the bytes of the checkpoint.
SHARED = 1.5


@dataclass(frozen=True)
class RankReads:
    """The reads of one rank.

    Attributes:
        bytes: number of bytes that the rank reads.
        machine: the rank's machine; "" if it is unknown.
    """

    bytes: int = 0
    machine: str = field(default_factory=boot_id)

    @classmethod
    def of_items(cls, items: Iterable[ReadItem], index: _core.CheckpointIndex | None) -> Self:
        """Counts the bytes of the tensors in a plan."""
        total = 0
        item_bytes: dict[str, int] = {}
        for item in items if index is not None else ():
            if item.type != LoadItemType.TENSOR:
                continue
            name = item.storage_index.fqn
            if name not in item_bytes:
                tensor = index.tensor(name) if index is not None else None
                item_bytes[name] = getattr(torch, tensor[0]).itemsize if tensor else 0
            total += math.prod(item.lengths) * item_bytes[name]
        return cls(total)


def machines_that_share(
    ranks: Iterable[RankReads | None], index: _core.CheckpointIndex | None
) -> frozenset[str]:
    """Returns the machines whose ranks want the same bytes."""
    read: Counter[str] = Counter()
    for reads in ranks:
        if reads is not None and reads.machine:
            read[reads.machine] += reads.bytes
    least = SHARED * index.stored_bytes if index is not None else 0
    return frozenset(machine for machine, total in read.items() if 0 < least <= total)
