"""``torch-ckpt ls``: lists the items and files of one checkpoint from its metadata."""

from __future__ import annotations

import fnmatch
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from torch_ckpt import _core
from torch_ckpt._base.formatting import Block, Report, Table, plural, printable, size
from torch_ckpt._base.system import is_url
from torch_ckpt.checkpoint.folders import Folder, names_if_listed
from torch_ckpt.checkpoint.index import METADATA_NAME, locations_of, read_index
from torch_ckpt.checkpoint.locating import OpenCheckpoint, open_checkpoint
from torch_ckpt.errors import CheckpointError, Unsafe


@dataclass(frozen=True)
class _Item:
    """An entry of the state dict: a tensor in one or more shards, or a serialized object."""

    name: str
    kind: str  # "tensor" or "bytes"
    dtype: str | None  # None for objects
    shape: list[int] | None  # shape of the complete tensor; None for objects
    parameters: int  # number of elements; 0 for objects
    shards: int
    stored_shards: int  # less than `shards` if the metadata does not locate every shard
    stored_bytes: int  # total size of its records in the files, including envelopes
    files: list[str]  # sorted, relative to the checkpoint directory


@dataclass(frozen=True)
class _Part:
    """The totals of the items below one top-level key."""

    key: str  # the names up to the first dot
    tensors: int
    objects: int
    parameters: int
    stored_bytes: int


@dataclass(frozen=True)
class _File:
    """A data file that the metadata names or that was found in the directory."""

    name: str  # relative to the checkpoint directory
    records: int  # number of records in the file; 0 if the metadata does not name the file
    stored_bytes: int  # total size of these records
    disk_bytes: int | None  # length of the file; None if it cannot be read
    state: str  # "ok", "missing", "too short", "unreadable" (not a regular file) or "unreferenced"


@dataclass
class Listing(Report):
    """The items, files and totals of one checkpoint."""

    path: str  # the checkpoint directory or its URL
    items: list[_Item]  # in natural order of their names
    files: list[_File]  # in natural order of their names
    disk_bytes: int  # size of the referenced files and the metadata
    # Modification time of the metadata, in the local time zone; None if a store does not report it.
    committed: datetime | None
    shows_files: bool = False  # whether ``blocks`` has the files instead of the items

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
        """The totals for each top-level key, in the order of the items."""
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
        """Reasons why loading the entire checkpoint would fail.

        Based only on the metadata and the file lengths.
        """
        files = [f"{file.name} ({file.state})" for file in self.referenced if file.state != "ok"]
        items = [
            f"{item.name} ({item.stored_shards} of {plural(item.shards, 'shard')} stored)"
            for item in self.items
            if item.stored_shards < item.shards
        ]
        return files + items

    def blocks(self) -> Iterator[Block]:
        """Yields tables of the items and of top-level keys, or of the files, and the totals."""
        if self.shows_files:
            yield self._file_table()
            yield ""
        else:
            yield self._item_table()
            yield ""
            # If every item has a top-level key of its own, the table would repeat the items.
            if len(self.parts) < len(self.items):
                yield self._part_table()
                yield ""
        totals = [
            plural(self.tensors, "tensor"),
            f"{self.parameters:,} {'parameter' if self.parameters == 1 else 'parameters'}",
            plural(len(self.items) - self.tensors, "object"),
            plural(len(self.referenced), "file"),
            f"{size(self.disk_bytes)} on disk",
        ]
        if self.committed is not None:
            totals.append(f"committed {self.committed:%Y-%m-%d %H:%M:%S %z}")
        yield f"total: {', '.join(totals)}"

    def _item_table(self) -> Table:
        rows = [
            (
                printable(item.name),
                item.dtype or "bytes",
                "-" if item.shape is None else str(item.shape),
                str(item.shards),
                size(item.stored_bytes),
                ", ".join(map(printable, item.files)) or "-",
            )
            for item in self.items
        ]
        header = ("NAME", "DTYPE", "SHAPE", "SHARDS", "STORED", "FILES")
        return Table(header, rows, frozenset({"SHARDS", "STORED"}), optional=("FILES", "SHARDS"))

    def _file_table(self) -> Table:
        rows = [
            (
                printable(file.name),
                str(file.records),
                size(file.stored_bytes),
                "-" if file.disk_bytes is None else size(file.disk_bytes),
                file.state,
            )
            for file in self.files
        ]
        header = ("FILE", "RECORDS", "STORED", "ON DISK", "STATE")
        return Table(header, rows, frozenset(header[1:4]), optional=("RECORDS", "STORED"))

    def _part_table(self) -> Table:
        rows = [
            (
                printable(part.key),
                str(part.tensors),
                str(part.objects),
                f"{part.parameters:,}",
                size(part.stored_bytes),
            )
            for part in self.parts
        ]
        header = ("KEY", "TENSORS", "OBJECTS", "PARAMETERS", "STORED")
        return Table(header, rows, frozenset(header[1:]), optional=("OBJECTS", "TENSORS"))

    def document(self) -> dict[str, Any]:
        """Returns the listing as a JSON document."""
        return {
            "checkpoint": self.path,
            "items": [asdict(item) for item in self.items],
            "files": [asdict(file) for file in self.files],
            "total": {
                "tensors": self.tensors,
                "bytes_items": len(self.items) - self.tensors,
                "parameters": self.parameters,
                "keys": [asdict(part) for part in self.parts],
                "files": len(self.referenced),
                "disk_bytes": self.disk_bytes,
                "committed": None if self.committed is None else self.committed.isoformat(),
            },
        }


def natural_order(name: str) -> list[str | int]:
    """Returns a sort key that orders layers.2 before layers.10."""
    # Text and numbers alternate, so numbers are only ever compared with numbers.
    parts: list[str | int] = list(re.split(r"([0-9]+)", name))
    parts[1::2] = map(int, parts[1::2])
    return parts


def select_names(names: Iterable[str], patterns: Sequence[str] | None, path: object) -> list[str]:
    """Selects the names that match a pattern, equal it or are below it ("a.b" is below "a").

    Args:
        patterns: names, prefixes or :mod:`fnmatch` patterns; None selects all names.
        path: the checkpoint, for the error message.

    Returns:
        The names in natural order.

    Raises:
        CheckpointError: a pattern matches no name.
    """
    names = sorted(names, key=natural_order)
    if patterns is None:
        return names
    present, chosen = set(names), set[str]()
    for pattern in patterns:
        # Try names first: many contain brackets, which are special in patterns.
        below = [name for name in names if name.startswith(f"{pattern}.")]
        found = [pattern, *below] if pattern in present else below or fnmatch.filter(names, pattern)
        if not found:
            raise CheckpointError(
                f"{path}: no name matches {pattern}. Run torch-ckpt ls to list the names"
            )
        chosen.update(found)
    return [name for name in names if name in chosen]


def is_damage(error: Exception) -> bool:
    """Returns False for an OSError that does not mean that a file is damaged."""
    if not isinstance(error, OSError):
        return True
    if is_url(error.filename):
        return isinstance(error, FileNotFoundError)
    return _core.is_file_damage(error.errno or 0)


def _check_file(folder: Folder, name: str, records: int, stored: int, end: int) -> _File:
    """Checks a file against the metadata: its last record ends at `end`."""
    try:
        length = folder.length_of(name)
    except FileNotFoundError:
        return _File(name, records, stored, None, "missing")
    except (OSError, Unsafe, ValueError) as error:
        if not is_damage(error):
            raise
        return _File(name, records, stored, None, "unreadable")
    return _File(name, records, stored, length, "ok" if length >= end else "too short")


def _find_unreferenced(folder: Folder, referenced: Iterable[str]) -> list[_File]:
    """Finds data files that the metadata does not name, such as from an interrupted save."""
    known = set(referenced)
    found = []
    for name in names_if_listed(folder):
        if not name.endswith(".distcp") or name in known:
            continue
        # A concurrent save may have removed the file.
        with suppress(FileNotFoundError):
            found.append(_File(name, 0, 0, folder.status(name).bytes, "unreferenced"))
    return found


def examine(
    path: str | os.PathLike[str],
    names: Sequence[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Listing:
    """Lists a checkpoint from its metadata and file lengths.

    Args:
        path: a checkpoint directory, ``ROOT/40`` for step 40 of a run, ROOT for its newest step, a
            safetensors file, or a directory of safetensors files; or the URL of one of these.
        names: names, prefixes or :mod:`fnmatch` patterns; None lists everything. Only files
            with a selected item are listed.
        storage_options: see :class:`torch_ckpt.ReadOptions`.

    Raises:
        CheckpointError, OSError: no checkpoint can be read, or a pattern matches no name.
    """
    opened = open_checkpoint(path, storage_options)
    with closing(opened.folder):
        return list_opened(opened, read_index(opened.folder, opened.safetensors), names)


def list_opened(
    opened: OpenCheckpoint, index: _core.CheckpointIndex, patterns: Sequence[str] | None = None
) -> Listing:
    """Combines the metadata with the file lengths. Reads no data. See :func:`examine`."""
    folder = opened.folder
    chosen = select_names(index.names(), patterns, opened.path)
    records, stored, ends = Counter[str](), Counter[str](), Counter[str]()

    def count(locations: Iterable[tuple[str, int, int]]) -> None:
        for file, offset, length in locations:
            records[file] += 1
            stored[file] += length
            ends[file] = max(ends[file], offset + length)

    items = []
    for name in chosen:
        tensor, shards = index.tensor(name), index.shards(name)
        locations = locations_of(shards)
        count(locations)
        items.append(
            _Item(
                name=name,
                kind="bytes" if tensor is None else "tensor",
                dtype=None if tensor is None else tensor[0],
                shape=None if tensor is None else list(tensor[1]),
                parameters=0 if tensor is None else math.prod(tensor[1]),
                shards=len(shards),
                stored_shards=sum(shard[2] is not None for shard in shards),
                stored_bytes=sum(length for _file, _at, length in locations),
                files=sorted({file for file, _at, _length in locations}, key=natural_order),
            )
        )
    if patterns is None:
        shards = [shard for _name, shard in index.undescribed_records()]
        count((file, at, length) for _o, _s, file, at, length, _t in shards if file is not None)

    # With patterns, `records` lacks the files of other names.
    is_complete = patterns is None and opened.safetensors is None
    # The listing of a store has the sizes of all files.
    unreferenced = _find_unreferenced(folder, records) if is_complete else []
    named = [_check_file(folder, f, records[f], stored[f], ends[f]) for f in records]
    # An index of safetensors files is written after the files.
    status = folder.status(opened.safetensors or METADATA_NAME)
    metadata_bytes = 0 if opened.safetensors in records else status.bytes
    files = [*named, *unreferenced]
    committed = None
    if status.modified is not None:
        committed = datetime.fromtimestamp(status.modified).astimezone()
    return Listing(
        path=opened.path,
        items=items,
        files=sorted(files, key=lambda file: natural_order(file.name)),
        disk_bytes=metadata_bytes + sum(file.disk_bytes or 0 for file in named),
        committed=committed,
    )
