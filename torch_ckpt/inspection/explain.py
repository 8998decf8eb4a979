"""``explain``: who wrote what of a checkpoint, and what took long.

1. The metadata says where every record lies; names of data files begin with the rank that wrote
   them.
2. A save of ours that the engine planned has the seconds of each rank in its metadata.
3. What stands out is told in sentences: a rank that wrote more than the others, and one that was
   slower with no more bytes.
"""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any

from torch_ckpt import _C
from torch_ckpt._base.formatting import plural, printable, size, table
from torch_ckpt.checkpoint.locating import open_checkpoint
from torch_ckpt.checkpoint.metadata import read_index_in

_OF_RANK = re.compile(r"__(\d+)_")

# What is less apart than this is not worth a sentence.
_STANDS_OUT = 1.5
_LEAST_SECONDS = 0.1


@dataclass
class RankShare:
    """What one rank wrote, and how long it took.

    Attributes:
        rank: None: files whose names tell no rank.
        records: of tensors one for each shard.
        bytes: of these records in the files.
        whole_bytes: of these the tensors and objects that are one record each, of which other ranks
            may have had the same.
        files: relative to the checkpoint's directory.
        largest: the name of its largest record, and the bytes of that.
        plan_s: from its state dict until it knew what to write, other ranks' planning included;
            None: not known.
        find_s: until it had found all values; objects are pickled then.
        write_s: until its files were durable.
    """

    rank: int | None
    records: int = 0
    bytes: int = 0
    whole_bytes: int = 0
    files: list[str] = field(default_factory=list)
    largest: tuple[str, int] = ("", -1)
    plan_s: float | None = None
    find_s: float | None = None
    write_s: float | None = None


@dataclass
class Explanation:
    """What :func:`explain` found.

    Attributes:
        checkpoint: the directory.
        ranks: those that wrote something, or whose seconds are known.
        remarks: sentences about what stands out.
    """

    checkpoint: str
    ranks: list[RankShare]
    remarks: list[str]

    def lines(self) -> Iterator[str]:
        """A line for each rank, and the remarks."""
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
        yield from table(header, rows, right=frozenset(header))
        yield ""
        yield from map(printable, self.remarks)

    def document(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return asdict(self)


def explain(path: str | os.PathLike[str]) -> Explanation:
    """Who wrote what of a checkpoint, of stock torch's too, and what took long. Reads its metadata.

    Raises:
        FileNotFoundError: there is no committed checkpoint.
        Unsafe, Corrupt, CheckpointError: its metadata cannot be read.
    """
    with closing(open_checkpoint(path)) as directory:
        index, found = read_index_in(directory), directory.path
    shares = _shares(index)
    ranks = sorted(shares.values(), key=lambda share: (share.rank is None, share.rank))
    return Explanation(found, ranks, list(_remarks(ranks)))


def _shares(index: _C.CheckpointIndex) -> dict[int | None, RankShare]:
    shares: dict[int | None, RankShare] = {}
    files: dict[str, RankShare] = {}
    for name in index.names():
        shards = index.shards(name)
        records = {shard[2:5] for shard in shards if shard[2] is not None}
        for file, _offset, length in records:
            assert file is not None
            if file not in files:
                found = _OF_RANK.search(file)
                rank = int(found[1]) if found else None
                files[file] = shares.setdefault(rank, RankShare(rank))
                files[file].files.append(file)
            share = files[file]
            share.records += 1
            share.bytes += length
            share.whole_bytes += length if len(shards) == 1 else 0
            share.largest = max(share.largest, (name, length), key=lambda record: record[1])
    for rank, (plan, find, write) in enumerate(_phases(index)):
        share = shares.setdefault(rank, RankShare(rank))
        share.plan_s, share.find_s, share.write_s = plan, find, write
    return shares


def _phases(index: _C.CheckpointIndex) -> list[tuple[float, float, float]]:
    """By rank the seconds of planning, finding and writing; none where they are not known."""
    try:
        return [(float(plan), float(find), float(write)) for plan, find, write in _told(index)]
    except (TypeError, ValueError, OverflowError, RecursionError):
        # Of another version, or damaged: of no weight for what is stored.
        return []


def _told(index: _C.CheckpointIndex) -> Any:
    return json.loads(index.phases() or "[]")


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
    if most.bytes > _STANDS_OUT * mean:
        name, of_name = most.largest
        yield (
            f"rank {most.rank} wrote {most.bytes / mean:.1f} times the mean of {size(mean)}: "
            f"{size(most.whole_bytes)} are tensors and objects that are one record each, and its "
            f"largest record is {name} with {size(of_name)}"
        )
    for title, attribute, why in (
        ("to write", "write_s", "its storage, or the way there, is slower"),
        (
            "to find its values",
            "find_s",
            "it pickles objects, or copies tensors, that others have not",
        ),
    ):
        timed = [share for share in ranks if getattr(share, attribute) is not None]
        if len(timed) < 2:
            continue
        slowest = max(timed, key=lambda share: getattr(share, attribute))
        took = getattr(slowest, attribute)
        median = statistics.median(getattr(share, attribute) for share in timed)
        if took < _LEAST_SECONDS or took < _STANDS_OUT * median:
            continue
        reason = why
        if attribute == "write_s" and slowest.bytes > _STANDS_OUT * mean:
            reason = "it wrote the most"
        yield f"rank {slowest.rank} took {took:.2f} s {title}, the median {median:.2f} s: {reason}"
