"""Decides whether the ranks of a load read through the page cache.

A direct read bypasses the page cache, which is faster if one rank wants the bytes. If several ranks
of a machine want the same bytes, as with DDP, the disk must send them once for each rank. Through
the page cache, the disk sends them once.

1. Each rank sends its machine, the number of bytes that it reads, and a digest of which bytes these
   are.
2. The coordinator adds up the bytes that the ranks of each machine read, and the bytes that they
   read at most once: those of ranks with different digests, but no more than the checkpoint has.
3. If the first sum, over all machines, is at least ``SHARED`` times the second, all ranks use the
   page cache. A rank ignores the decision if its reader has ``read_once`` or a ``direct_io`` other
   than "auto".
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from torch_ckpt import _core
from torch_ckpt._base.system import boot_id
from torch_ckpt.checkpoint.source import Facts
from torch_ckpt.errors import CheckpointError

#: Bytes that the ranks read, relative to the different bytes.
SHARED = 1.5


@dataclass(frozen=True)
class RankReads:
    """A message of a rank about what it reads.

    Attributes:
        bytes: number of bytes that the rank reads.
        digest: a number that is equal for ranks that read the same bytes.
        resolved: see :class:`torch_ckpt.checkpoint.source.Source`.
        machine: the rank's machine; "" if it is unknown.
    """

    bytes: int = 0
    digest: int = 0
    resolved: Facts = ()
    machine: str = field(default_factory=boot_id)

    @classmethod
    def of_items(
        cls,
        items: Iterable[ReadItem],
        index: _core.CheckpointIndex,
        resolved: Facts = (),
    ) -> RankReads:
        """Describes the tensors in a plan of torch's planner."""
        total, digest = 0, 0
        item_bytes: dict[str, int] = {}
        for item in items:
            if item.type != LoadItemType.TENSOR:
                continue
            name = item.storage_index.fqn
            if name not in item_bytes:
                tensor = index.tensor(name)
                item_bytes[name] = getattr(torch, tensor[0]).itemsize if tensor else 0
            total += math.prod(item.lengths) * item_bytes[name]
            what = f"{name} {item.storage_index.offset} {item.storage_offsets} {item.lengths}"
            # A name may contain bytes that are not UTF-8.
            digest = zlib.crc32(what.encode(errors="backslashreplace"), digest)
        return cls(total, digest, resolved)


class DifferentSaves(CheckpointError):
    """Ranks have opened different checkpoints."""


def want_same_bytes(ranks: Sequence[RankReads], stored_bytes: int | None, title: str) -> bool:
    """Returns True if many of the bytes that the ranks of a machine read are the same.

    Args:
        ranks: the reads of each rank.
        stored_bytes: bytes of the checkpoint; None if each rank reads its own checkpoint.
        title: the checkpoint as the user knows it.

    Raises:
        DifferentSaves: ranks have opened different checkpoints.
    """
    answers: dict[str, str] = {}
    facts = {fact for reads in ranks for fact in reads.resolved}
    if any(answers.setdefault(question, answer) != answer for question, answer in facts):
        raise DifferentSaves(
            f"{title}: ranks have read the metadata of different saves, because the checkpoint was "
            "replaced or a newer step was saved while the load started; load again"
        )
    machines: defaultdict[str, list[RankReads]] = defaultdict(list)
    for reads in ranks:
        if reads.machine:
            machines[reads.machine].append(reads)
    read, different = 0, 0
    for on_machine in machines.values():
        read += sum(reads.bytes for reads in on_machine)
        most = sum(reads.bytes for reads in set(on_machine))
        different += most if stored_bytes is None else min(most, stored_bytes)
    return 0 < SHARED * different <= read
