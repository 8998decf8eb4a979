"""What ``torch-ckpt ls`` shows: the items and files of one checkpoint, by its metadata."""

from __future__ import annotations

import fnmatch
import math
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from torch_ckpt import _C
from torch_ckpt._base.formatting import plural, printable, size, table
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.locating import open_checkpoint
from torch_ckpt.checkpoint.metadata import METADATA_NAME, read_index_in
from torch_ckpt.errors import CheckpointError, Unsafe
from torch_ckpt.inspection.verify import is_damage


@dataclass(frozen=True)
class _Item:
    """One entry of the state dict: a tensor in one or more shards, or an object in bytes."""

    name: str
    kind: str  # "tensor" or "bytes"
    dtype: str | None  # None for bytes
    shape: list[int] | None  # of the whole tensor; None for bytes
    parameters: int  # elements of the tensor; 0 for bytes
    shards: int
    stored_shards: int  # fewer than `shards` when the save lost some
    stored_bytes: int  # what all its records take up in the files, envelopes included
    files: list[str]  # sorted, relative to the checkpoint directory


@dataclass(frozen=True)
class _Part:
    """What the items of one top-level key come to."""

    key: str  # what stands before the first dot of their names
    tensors: int
    objects: int
    parameters: int
    stored_bytes: int


@dataclass(frozen=True)
class _File:
    """One data file: named by the metadata, found in the directory, or both."""

    name: str  # relative to the checkpoint directory
    records: int  # that the metadata places in it; 0 for a file that the metadata does not name
    stored_bytes: int  # what these records take up
    disk_bytes: int | None  # its length; None when it is not there
    state: str  # "ok", "missing", "too short", "unreadable" (a link, no file) or "unreferenced"


@dataclass(frozen=True)
class Listing:
    """What ``ls`` shows of one checkpoint."""

    path: str  # of the checkpoint's directory
    items: list[_Item]  # sorted by name, numbers in names by value
    files: list[_File]  # likewise
    disk_bytes: int  # of the referenced files and the metadata
    committed: datetime  # the metadata's modification time, local time zone

    @property
    def referenced(self) -> list[_File]:
        return [file for file in self.files if file.records > 0]

    @property
    def tensors(self) -> int:
        return sum(item.kind == "tensor" for item in self.items)

    @property
    def parameters(self) -> int:
        return sum(item.parameters for item in self.items)

    @property
    def parts(self) -> list[_Part]:
        """Sums by top-level key, in the order of the items."""
        groups: dict[str, list[_Item]] = {}
        for item in self.items:
            groups.setdefault(item.name.partition(".")[0], []).append(item)
        return [
            _Part(
                key,
                tensors=(tensors := sum(item.kind == "tensor" for item in items)),
                objects=len(items) - tensors,
                parameters=sum(item.parameters for item in items),
                stored_bytes=sum(item.stored_bytes for item in items),
            )
            for key, items in groups.items()
        ]

    @property
    def faults(self) -> list[str]:
        """What keeps this checkpoint from being loaded whole, as far as lengths can tell."""
        files = [f"{file.name} ({file.state})" for file in self.referenced if file.state != "ok"]
        items = [
            f"{item.name} ({item.stored_shards} of {plural(item.shards, 'shard')} stored)"
            for item in self.items
            if item.stored_shards < item.shards
        ]
        return files + items


def natural(name: str) -> list[str | int]:
    """Sorts layers.2 before layers.10; text and numbers alternate, so like meets like."""
    parts: list[str | int] = list(re.split(r"([0-9]+)", name))
    parts[1::2] = map(int, parts[1::2])
    return parts


def matching(names: Iterable[str], patterns: Sequence[str] | None, path: object) -> list[str]:
    """Selects names in natural order: equal to a pattern, below it, or like it.

    "a.b" is below "a". A pattern is one of :mod:`fnmatch`.

    Args:
        patterns: None for all names.
        path: of the checkpoint, for the message.

    Raises:
        CheckpointError: no name is like one of the patterns.
    """
    names = sorted(names, key=natural)
    if patterns is None:
        return names
    present, chosen = set(names), set[str]()
    for pattern in patterns:
        # Brackets are part of many names.
        below = [name for name in names if name.startswith(f"{pattern}.")]
        like = [pattern, *below] if pattern in present else below or fnmatch.filter(names, pattern)
        if not like:
            raise CheckpointError(
                f"{path}: nothing has a name like {pattern}; torch-ckpt ls lists the names"
            )
        chosen.update(like)
    return [name for name in names if name in chosen]


def _look_at_file(
    directory: OpenDirectory, name: str, records: int, stored: int, end: int
) -> _File:
    """Compares a file with what the metadata says of it; its last record ends at byte `end`."""
    try:
        length = directory.length_of(name)
    except FileNotFoundError:
        return _File(name, records, stored, None, "missing")
    except (OSError, Unsafe, ValueError) as error:
        if isinstance(error, OSError) and not is_damage(error.errno or 0):
            raise
        return _File(name, records, stored, None, "unreadable")
    return _File(name, records, stored, length, "ok" if length >= end else "too short")


def _unreferenced(directory: Path, referenced: Iterable[str]) -> list[_File]:
    """Finds data files that the metadata does not name, such as those of a save cut off."""
    known = set(referenced)
    found = []
    for path in directory.glob("*.distcp"):
        if path.name in known:
            continue
        # A save beside us may have removed it, and a link is not followed.
        with suppress(FileNotFoundError):
            found.append(_File(path.name, 0, 0, path.lstat().st_size, "unreferenced"))
    return found


def _put_together(
    directory: Path,
    opened: OpenDirectory,
    index: _C.CheckpointIndex,
    patterns: Sequence[str] | None,
) -> Listing:
    """Puts together what the metadata says and what lies in the directory; reads no data file."""
    chosen = matching(index.names(), patterns, directory)
    records: dict[str, int] = {}
    stored: dict[str, int] = {}
    ends: dict[str, int] = {}

    def count(places: Iterable[tuple[str, int, int]]) -> None:
        for file, offset, length in places:
            records[file] = records.get(file, 0) + 1
            stored[file] = stored.get(file, 0) + length
            ends[file] = max(ends.get(file, 0), offset + length)

    items = []
    for name in chosen:
        tensor, shards = index.tensor(name), index.shards(name)
        # Empty shards at one place have one record.
        places = {(file, at, length) for _o, _s, file, at, length, _t in shards if file is not None}
        count(places)
        items.append(
            _Item(
                name=name,
                kind="bytes" if tensor is None else "tensor",
                dtype=None if tensor is None else tensor[0],
                shape=None if tensor is None else list(tensor[1]),
                parameters=0 if tensor is None else math.prod(tensor[1]),
                shards=len(shards),
                stored_shards=sum(shard[2] is not None for shard in shards),
                stored_bytes=sum(length for _file, _at, length in places),
                files=sorted({file for file, _at, _length in places}, key=natural),
            )
        )
    if patterns is None:
        strays = [shard for _name, shard in index.strays()]
        count((file, at, length) for _o, _s, file, at, length, _t in strays if file is not None)

    named = [_look_at_file(opened, f, records[f], stored[f], ends[f]) for f in records]
    status = (directory / METADATA_NAME).stat()
    # With a filter, a file that holds nothing of what is chosen is not one that nothing names.
    files = [*named, *(_unreferenced(directory, records) if patterns is None else [])]
    return Listing(
        path=opened.path,
        items=items,
        files=sorted(files, key=lambda file: natural(file.name)),
        disk_bytes=status.st_size + sum(file.disk_bytes or 0 for file in named),
        committed=datetime.fromtimestamp(status.st_mtime).astimezone(),
    )


def examine(path: str | os.PathLike[str], names: Sequence[str] | None = None) -> Listing:
    """Looks at a checkpoint's metadata and at the lengths of its files.

    Args:
        path: of the checkpoint's directory; or ``ROOT/40``, or ROOT for its newest step.
        names: fully qualified ones, or patterns as of :mod:`fnmatch`; all if None. Files are those
            that hold something of these.

    Raises:
        CheckpointError, OSError: there is no checkpoint that can be read, or no name is like one of
            the patterns.
    """
    with closing(open_checkpoint(path)) as opened:
        return _put_together(Path(opened.path), opened, read_index_in(opened), names)


def item_lines(listing: Listing) -> Iterable[str]:
    """One line for each item, below a header."""
    rows = [
        (
            printable(item.name),
            item.dtype or "bytes",
            "-" if item.shape is None else str(item.shape),
            str(item.shards),
            size(item.stored_bytes),
            ", ".join(map(printable, item.files)) or "-",
        )
        for item in listing.items
    ]
    header = ("NAME", "DTYPE", "SHAPE", "SHARDS", "STORED", "FILES")
    return table(header, rows, right=frozenset({"SHARDS", "STORED"}))


def file_lines(listing: Listing) -> Iterable[str]:
    """One line for each file, below a header."""
    rows = [
        (
            printable(file.name),
            str(file.records),
            size(file.stored_bytes),
            "-" if file.disk_bytes is None else size(file.disk_bytes),
            file.state,
        )
        for file in listing.files
    ]
    header = ("FILE", "RECORDS", "STORED", "ON DISK", "STATE")
    return table(header, rows, right=frozenset({"RECORDS", "STORED", "ON DISK"}))


def part_lines(listing: Listing) -> Iterable[str]:
    """One line for each top-level key, below a header; none where each item is one of them."""
    parts = listing.parts
    if len(parts) == len(listing.items):
        return []
    rows = [
        (
            printable(part.key),
            str(part.tensors),
            str(part.objects),
            f"{part.parameters:,}",
            size(part.stored_bytes),
        )
        for part in parts
    ]
    header = ("KEY", "TENSORS", "OBJECTS", "PARAMETERS", "STORED")
    return table(header, rows, right=frozenset(header[1:]))


def total_line(listing: Listing) -> str:
    """What it comes to."""
    parts = (
        plural(listing.tensors, "tensor"),
        f"{listing.parameters:,} {'parameter' if listing.parameters == 1 else 'parameters'}",
        plural(len(listing.items) - listing.tensors, "object"),
        plural(len(listing.referenced), "file"),
        f"{size(listing.disk_bytes)} on disk",
        f"committed {listing.committed:%Y-%m-%d %H:%M:%S %z}",
    )
    return f"total: {', '.join(parts)}"


def document(listing: Listing) -> dict[str, Any]:
    """All of it, for JSON."""
    return {
        "checkpoint": listing.path,
        "items": [asdict(item) for item in listing.items],
        "files": [asdict(file) for file in listing.files],
        "total": {
            "tensors": listing.tensors,
            "bytes_items": len(listing.items) - listing.tensors,
            "parameters": listing.parameters,
            "keys": [asdict(part) for part in listing.parts],
            "files": len(listing.referenced),
            "disk_bytes": listing.disk_bytes,
            "committed": listing.committed.isoformat(),
        },
    }
