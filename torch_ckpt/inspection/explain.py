"""``explain``: shows what each rank wrote to a checkpoint, and which phases were slow.

1. The metadata locates every record. A data file's name contains the rank that wrote it.
2. If the engine planned the save, the metadata records how long each phase took on each rank.
3. Remarks name ranks that wrote more than the others, or were slower without writing more.
"""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from torch_ckpt import _core
from torch_ckpt._base.formatting import Block, Report, Table, plural, printable, size
from torch_ckpt.checkpoint.index import locations_of, read_index
from torch_ckpt.checkpoint.locating import open_checkpoint
from torch_ckpt.inspection.listing import list_opened

_RANK_IN_FILE_NAME = re.compile(r"__(\d+)_")

# Thresholds: no remark is made on smaller ratios or shorter phases.
_NOTABLE_RATIO = 1.5
_NOTABLE_SECONDS = 0.1


@dataclass
class RankShare:
    """The records that one rank wrote, and the durations of its phases; None if not recorded."""

    rank: int | None  # None for files whose names contain no rank
    records: int = 0  # each shard of a tensor is one
    bytes: int = 0  # total size of these records in the files
    # The part of `bytes` that belongs to unsharded tensors and to objects, of which other ranks may
    # have had replicas.
    whole_bytes: int = 0
    files: list[str] = field(default_factory=list)  # relative to the checkpoint directory
    largest: tuple[str, int] = ("", -1)  # name and size in bytes of the largest record
    # Seconds from the state dict to the finished plan, including waiting for other ranks.
    plan_s: float | None = None
    find_s: float | None = None  # seconds to resolve all values, including pickling objects
    write_s: float | None = None  # seconds until the rank's files were durable


@dataclass
class Explanation(Report):
    """Result of :func:`explain`."""

    checkpoint: str  # the checkpoint directory
    ranks: list[RankShare]  # ranks that wrote a record or whose durations are recorded
    remarks: list[str]  # a summary, and a sentence about each rank that stands out
    # Missing shards, and data files that are missing or too short.
    faults: list[str] = field(default_factory=list)

    def blocks(self) -> Iterator[Block]:
        """Yields a table with a row for each rank, and the remarks."""
        rows = [
            (
                "-" if share.rank is None else str(share.rank),
                str(share.records),
                size(share.bytes),
                size(share.whole_bytes),
                str(len(share.files)),
                *(
                    "-" if seconds is None else f"{seconds:.2f} s"
                    for seconds in (share.plan_s, share.find_s, share.write_s)
                ),
                f"{size(share.bytes / share.write_s)}/s" if share.write_s else "-",
            )
            for share in self.ranks
        ]
        header = ("RANK", "RECORDS", "BYTES", "WHOLE", "FILES", "PLAN", "FIND", "WRITE", "RATE")
        optional = ("FILES", "RECORDS", "WHOLE")
        yield Table(header, rows, frozenset(header), optional)
        yield ""
        yield from map(printable, self.remarks)


def explain(
    path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> Explanation:
    """Reports what each rank wrote to a checkpoint, and which phases were slow.

    Reads only the metadata, which stock torch may have written, and the lengths of the files.

    Args:
        path: a checkpoint directory, ``ROOT/40`` for step 40 of a run, or ROOT for its newest
            step; or the URL of one of these.
        storage_options: see :class:`torch_ckpt.ReadOptions`.

    Raises:
        FileNotFoundError: there is no committed checkpoint.
        Unsafe, Corrupt, CheckpointError: the metadata cannot be read.
    """
    opened = open_checkpoint(path, storage_options)
    with closing(opened.folder):
        index = read_index(opened.folder, opened.safetensors)
        faults = list_opened(opened, index).faults
    shares = _share_of_each_rank(index)
    ranks = sorted(shares.values(), key=lambda share: (share.rank is None, share.rank))
    return Explanation(opened.path, ranks, list(_remarks(ranks)), faults)


def _share_of_each_rank(index: _core.CheckpointIndex) -> dict[int | None, RankShare]:
    shares: dict[int | None, RankShare] = {}
    files: dict[str, RankShare] = {}
    for name in index.names():
        shards = index.shards(name)
        for file, _offset, length in locations_of(shards):
            if file not in files:
                found = _RANK_IN_FILE_NAME.search(file)
                rank = int(found[1]) if found else None
                files[file] = shares.setdefault(rank, RankShare(rank))
                files[file].files.append(file)
            share = files[file]
            share.records += 1
            share.bytes += length
            share.whole_bytes += length if len(shards) == 1 else 0
            share.largest = max(share.largest, (name, length), key=lambda record: record[1])
    for rank, (plan, find, write) in enumerate(_phase_seconds(index)):
        share = shares.setdefault(rank, RankShare(rank))
        share.plan_s, share.find_s, share.write_s = plan, find, write
    return shares


def _phase_seconds(index: _core.CheckpointIndex) -> list[tuple[float, float, float]]:
    """Returns each rank's (plan, find, write) seconds; an empty list if not recorded."""
    try:
        phases: Any = json.loads(index.phases() or "[]")
        return [(float(plan), float(find), float(write)) for plan, find, write in phases]
    except (TypeError, ValueError, OverflowError, RecursionError):
        # Another version wrote the durations, or they are damaged. No data depends on them.
        return []


def _remarks(ranks: list[RankShare]) -> Iterator[str]:
    total = sum(share.bytes for share in ranks)
    yield (
        f"{plural(len(ranks), 'rank')} wrote {plural(sum(s.records for s in ranks), 'record')}, "
        f"{size(total)}"
    )
    if len(ranks) < 2:
        return
    mean = total / len(ranks)
    most = max(ranks, key=lambda share: share.bytes)
    if most.bytes > _NOTABLE_RATIO * mean:
        name, length = most.largest
        yield (
            f"rank {most.rank} wrote {most.bytes / mean:.1f} times the mean of {size(mean)}; "
            f"{size(most.whole_bytes)} of that is unsharded tensors and objects, and the largest "
            f"record is {name} ({size(length)})"
        )
    for title, attribute, why in (
        ("to write", "write_s", "its storage, or the connection to it, is slower"),
        (
            "to collect its values",
            "find_s",
            "it pickles objects or copies tensors that other ranks do not have",
        ),
    ):
        timed = [share for share in ranks if getattr(share, attribute) is not None]
        if len(timed) < 2:
            continue
        slowest = max(timed, key=lambda share: getattr(share, attribute))
        took = getattr(slowest, attribute)
        median = statistics.median(getattr(share, attribute) for share in timed)
        if took < _NOTABLE_SECONDS or took < _NOTABLE_RATIO * median:
            continue
        reason = f"perhaps {why}"
        if attribute == "write_s" and slowest.bytes > _NOTABLE_RATIO * mean:
            reason = "it wrote the most"
        yield (
            f"rank {slowest.rank} took {took:.2f} s {title} (the median rank: {median:.2f} s); "
            f"{reason}"
        )
