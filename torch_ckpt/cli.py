"""The command line: ``torch-ckpt`` and ``python -m torch_ckpt``.

A command is one function that takes the parsed arguments, prints to stdout and returns the exit
code; ``_parser`` names it in a subparser. A command raises CheckpointError or OSError for what it
cannot read: ``main`` makes of it one sentence on stderr and exit code 2.

Exit codes: 0 all is well, 1 the command ran and found something wrong with the checkpoint, 2 there
is no checkpoint to look at (or the command line is wrong).
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torch_ckpt.errors import CheckpointError
from torch_ckpt.metadata import METADATA_NAME, read_metadata


@dataclass(frozen=True)
class _Item:
    """One entry of the state dict: a tensor in one or more shards, or an object in bytes."""

    name: str
    kind: str  # "tensor" or "bytes"
    dtype: str | None  # None for bytes
    shape: list[int] | None  # of the whole tensor; None for bytes
    shards: int
    stored_shards: int  # fewer than `shards` when the save lost some
    stored_bytes: int  # what all its records take up in the files, envelopes included
    files: list[str]  # sorted, relative to the checkpoint directory


@dataclass(frozen=True)
class _File:
    """One data file: named by the metadata, found in the directory, or both."""

    name: str  # relative to the checkpoint directory
    records: int  # that the metadata places in it; 0 for a file that the metadata does not name
    stored_bytes: int  # what these records take up
    disk_bytes: int | None  # its length; None when it is not there
    state: str  # "ok", "missing", "too short" or "unreferenced"


@dataclass(frozen=True)
class _Listing:
    """What ``ls`` shows of one checkpoint."""

    items: list[_Item]  # sorted by name, numbers in names by value
    files: list[_File]  # likewise
    disk_bytes: int  # of the referenced files and the metadata
    committed: datetime  # the metadata's modification time, local time zone

    @property
    def referenced(self) -> list[_File]:
        return [file for file in self.files if file.records > 0]

    @property
    def faults(self) -> list[str]:
        """What keeps this checkpoint from being loaded whole, as far as lengths can tell."""
        files = [f"{file.name} ({file.state})" for file in self.referenced if file.state != "ok"]
        items = [
            f"{item.name} ({item.stored_shards} of {_plural(item.shards, 'shard')} stored)"
            for item in self.items
            if item.stored_shards < item.shards
        ]
        return files + items


def _natural(name: str) -> list[str | int]:
    """Sorts layers.2 before layers.10; text and numbers alternate, so like meets like."""
    parts: list[str | int] = list(re.split(r"([0-9]+)", name))
    parts[1::2] = map(int, parts[1::2])
    return parts


def _look_at_file(directory: Path, name: str, records: int, stored: int, end: int) -> _File:
    """Compares a file with what the metadata says of it; its last record ends at byte `end`."""
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts:
        # Names come from the metadata, which may come from anywhere: none of them reaches outside.
        return _File(name, records, stored, None, "missing")
    try:
        length = (directory / relative).stat().st_size
    except (OSError, ValueError):  # ValueError: a name with a NUL byte
        return _File(name, records, stored, None, "missing")
    return _File(name, records, stored, length, "ok" if length >= end else "too short")


def _unreferenced(directory: Path, referenced: Iterable[str]) -> list[_File]:
    """Finds data files that the metadata does not name, such as those of a save cut off."""
    known = set(referenced)
    return [
        _File(path.name, 0, 0, path.stat().st_size, "unreferenced")
        for path in directory.glob("*.distcp")
        if path.name not in known
    ]


def _dtype_name(tensor: TensorStorageMetadata) -> str:
    return str(tensor.properties.dtype).removeprefix("torch.")


def _examine(directory: Path, metadata: Metadata) -> _Listing:
    """Puts together what the metadata says and what lies in the directory; reads no data file."""
    item_records: dict[str, int] = {}
    item_bytes: dict[str, int] = {}
    item_files: dict[str, set[str]] = {}
    records: dict[str, int] = {}
    stored: dict[str, int] = {}
    ends: dict[str, int] = {}
    for index, info in (metadata.storage_data or {}).items():
        file = info.relative_path
        item_records[index.fqn] = item_records.get(index.fqn, 0) + 1
        item_bytes[index.fqn] = item_bytes.get(index.fqn, 0) + info.length
        item_files.setdefault(index.fqn, set()).add(file)
        records[file] = records.get(file, 0) + 1
        stored[file] = stored.get(file, 0) + info.length
        ends[file] = max(ends.get(file, 0), info.offset + info.length)

    items = []
    for name, entry in metadata.state_dict_metadata.items():
        tensor = entry if isinstance(entry, TensorStorageMetadata) else None
        items.append(
            _Item(
                name=name,
                kind="bytes" if tensor is None else "tensor",
                dtype=None if tensor is None else _dtype_name(tensor),
                shape=None if tensor is None else list(tensor.size),
                shards=1 if tensor is None else len(tensor.chunks),
                stored_shards=item_records.get(name, 0),
                stored_bytes=item_bytes.get(name, 0),
                files=sorted(item_files.get(name, ()), key=_natural),
            )
        )

    named = [_look_at_file(directory, f, records[f], stored[f], ends[f]) for f in records]
    status = (directory / METADATA_NAME).stat()
    files = [*named, *_unreferenced(directory, records)]
    return _Listing(
        items=sorted(items, key=lambda item: _natural(item.name)),
        files=sorted(files, key=lambda file: _natural(file.name)),
        disk_bytes=status.st_size + sum(file.disk_bytes or 0 for file in named),
        committed=datetime.fromtimestamp(status.st_mtime).astimezone(),
    )


def _size(count: int) -> str:
    """Writes a number of bytes for people: "704 B", "20.9 MB" (powers of ten, as on disks)."""
    if count < 1000:
        return f"{count} B"
    value, units = count / 1000, ["kB", "MB", "GB", "TB"]
    while value >= 999.95 and len(units) > 1:  # which would be written as 1000.0
        value /= 1000
        del units[0]
    return f"{value:.1f} {units[0]}"


def _printable(text: str) -> str:
    """Escapes what a terminal would act on: a checkpoint, and so its names, may be anybody's."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _print_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], right: frozenset[str]
) -> None:
    """Prints aligned columns, two spaces apart; the columns named in `right` end flush."""
    table = [header, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    for row in table:
        cells = (
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(header, row, widths, strict=True)
        )
        print("  ".join(cells).rstrip())


def _print_items(listing: _Listing) -> None:
    rows = [
        (
            _printable(item.name),
            item.dtype or "bytes",
            "-" if item.shape is None else str(item.shape),
            str(item.shards),
            _size(item.stored_bytes),
            ", ".join(map(_printable, item.files)) or "-",
        )
        for item in listing.items
    ]
    header = ("NAME", "DTYPE", "SHAPE", "SHARDS", "STORED", "FILES")
    _print_table(header, rows, right=frozenset({"SHARDS", "STORED"}))


def _print_files(listing: _Listing) -> None:
    rows = [
        (
            _printable(file.name),
            str(file.records),
            _size(file.stored_bytes),
            "-" if file.disk_bytes is None else _size(file.disk_bytes),
            file.state,
        )
        for file in listing.files
    ]
    header = ("FILE", "RECORDS", "STORED", "ON DISK", "STATE")
    _print_table(header, rows, right=frozenset({"RECORDS", "STORED", "ON DISK"}))


def _print_total(listing: _Listing) -> None:
    tensors = sum(item.kind == "tensor" for item in listing.items)
    parts = (
        _plural(tensors, "tensor"),
        _plural(len(listing.items) - tensors, "bytes item"),
        _plural(len(listing.referenced), "file"),
        f"{_size(listing.disk_bytes)} on disk",
        f"committed {listing.committed:%Y-%m-%d %H:%M:%S %z}",
    )
    print(f"total: {', '.join(parts)}")


def _print_json(listing: _Listing, directory: Path) -> None:
    tensors = sum(item.kind == "tensor" for item in listing.items)
    document = {
        "checkpoint": os.fspath(directory),
        "items": [asdict(item) for item in listing.items],
        "files": [asdict(file) for file in listing.files],
        "total": {
            "tensors": tensors,
            "bytes_items": len(listing.items) - tensors,
            "files": len(listing.referenced),
            "disk_bytes": listing.disk_bytes,
            "committed": listing.committed.isoformat(),
        },
    }
    print(json.dumps(document, indent=2))


def _ls(arguments: argparse.Namespace) -> int:
    """Lists one checkpoint; returns 1 when files or shards of it are missing or files too short."""
    directory: Path = arguments.directory
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "does not exist"
        raise CheckpointError(f"{directory} {what}")
    metadata = read_metadata(directory)
    try:
        listing = _examine(directory, metadata)
    except (AttributeError, TypeError, ValueError) as error:
        # Unpickling checks which classes come, not what is in their fields.
        raise CheckpointError(f"{directory / METADATA_NAME} is damaged: {error}") from error
    if arguments.json:
        _print_json(listing, directory)
    else:
        (_print_files if arguments.files else _print_items)(listing)
        print()
        _print_total(listing)
    if listing.faults:
        faults = _printable(", ".join(listing.faults))
        print(f"torch-ckpt: {directory} cannot be loaded whole: {faults}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    """Builds the command line; a command is a subparser with its function as the default `run`."""
    parser = argparse.ArgumentParser(
        prog="torch-ckpt", description="Look at checkpoints of torch_ckpt and of stock PyTorch."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    ls = commands.add_parser(
        "ls",
        help="list what a checkpoint holds",
        description="List the tensors and objects of a checkpoint directory. Reads its metadata "
        "and the lengths of its files, not the data. Exits with 1 when a data file or a shard is "
        "missing or a file is too short, with 2 when there is no checkpoint that can be read.",
    )
    ls.add_argument("directory", type=Path, metavar="DIR", help="the checkpoint directory")
    form = ls.add_mutually_exclusive_group()
    form.add_argument("--files", action="store_true", help="one line per file instead of per item")
    form.add_argument("--json", action="store_true", help="everything as one JSON document")
    ls.set_defaults(run=_ls)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; `argv` is without the program's name.

    Raises SystemExit with code 2 for a wrong command line (and 0 for ``--help``), as argparse does.
    """
    arguments = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        code = run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of a pipe (`| head`) has seen enough. What is still buffered goes nowhere, or
        # Python complains about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        # Without Python's "[Errno 2]" and quotes, which say nothing more to people.
        text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        print(f"torch-ckpt: {_printable(text)}", file=sys.stderr)
        return 2
    except CheckpointError as error:
        print(f"torch-ckpt: {_printable(str(error))}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
