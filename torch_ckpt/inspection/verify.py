"""``verify``: checks an entire checkpoint against its checksums, without loading it.

1. Take a shared lock on the directory, as a load does, and read the metadata. Beneath a URL there
   are no locks, but an object that is replaced during the verification is an error.
2. Check that the metadata locates every shard, that the shards cover their tensors, and that no
   file is shorter or longer than its records.
3. Have the engine read every record and check it against all its checksums: those of blocks,
   archives and objects if the metadata has them, otherwise the CRC-32 of every archive entry.
4. List records that could not be read for a reason other than damage, such as too few file
   descriptors, separately from damaged records.

The check continues after damage, and the report lists all of it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any

from torch_ckpt import _core
from torch_ckpt._base.formatting import Report, plural, printable, size, some_of
from torch_ckpt._base.progress import Progress, ProgressOption, reporting
from torch_ckpt.checkpoint.directory import share_or_warn
from torch_ckpt.checkpoint.folders import Folder, RemoteFolder, names_if_listed
from torch_ckpt.checkpoint.index import METADATA_NAME, read_index_in, read_safetensors
from torch_ckpt.checkpoint.locating import open_checkpoint
from torch_ckpt.checkpoint.marker import MARKER_NAME, PINNED_NAME, STEP_NAME
from torch_ckpt.options import ReadOptions

_METADATA_OF_RANK = re.compile(rf"^__\d+{re.escape(METADATA_NAME)}$")


@dataclass(frozen=True)
class Damage:
    """A damaged or unreadable region of a file.

    Attributes:
        name: the tensor or object; None if the file itself is damaged.
        file: file name relative to the checkpoint directory.
        offset: byte offset in the file; None if the damage has no single offset.
        bytes: number of damaged bytes, starting at ``offset``; 0 if unknown.
        what: short description of the problem.

    Example::

        for damage in torch_ckpt.verify("run/40").damaged:
            print(damage.file, damage.offset, damage.what)
    """

    name: str | None
    file: str
    offset: int | None
    bytes: int
    what: str

    def __str__(self) -> str:
        text = self.file if self.name is None else f"{self.name}: {self.file}"
        if self.offset is not None:
            text += f" at byte {self.offset}"
        if self.bytes:
            text += f", {plural(self.bytes, 'byte')}"
        return f"{text}: {self.what}"


@dataclass
class VerifyReport(Report):
    """Result of :func:`verify`.

    Attributes:
        checkpoint: the checkpoint directory.
        records: number of records that were read and verified; each shard of a tensor is one
            record.
        bytes: total size of these records.
        seconds: duration of the verification.
        damaged: damaged records and files, sorted by file and offset.
        missing: (file, names stored in it) for each file that does not exist.
        incomplete: (name, problem) for each tensor or object whose data the metadata does not
            locate completely.
        unread: records and files that could not be read for a reason other than damage, such as too
            few file descriptors or a lack of permission. These records and files can still be
            intact. Empty for URLs.
        unverifiable: names of records without a checksum that covers every byte, such as records
            written with ``torch.serialization.set_crc32_options(False)``.
        unreferenced: files in the directory that the metadata does not name. These do not count as
            damage. Empty for safetensors files, and if a store does not list its objects.

    Example::

        report = torch_ckpt.verify("run/40")
        if not report.ok:
            print(*report.faults(), sep="\\n")
    """

    checkpoint: str
    records: int = 0
    bytes: int = 0
    seconds: float = 0.0
    damaged: list[Damage] = field(default_factory=list)
    missing: list[tuple[str, list[str]]] = field(default_factory=list)
    incomplete: list[tuple[str, str]] = field(default_factory=list)
    unread: list[Damage] = field(default_factory=list)
    unverifiable: list[str] = field(default_factory=list)
    unreferenced: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if all records were read, and nothing is damaged, missing or incomplete."""
        return not (self.has_damage or self.unread)

    @property
    def has_damage(self) -> bool:
        """True if anything is damaged, missing or incomplete."""
        return bool(self.damaged or self.missing or self.incomplete)

    def faults(self) -> Iterator[str]:
        """Yields a line for each fault, with escaped names. A line names at most eight values; the
        attributes have all of them."""
        for damage in self.damaged:
            yield printable(f"damaged: {damage}")
        for file, names in self.missing:
            yield printable(f"missing: {file}, which holds {some_of(names)}")
        for name, what in self.incomplete:
            yield printable(f"incomplete: {name}: {what}")
        for unread in self.unread:
            yield printable(f"not read: {unread}")

    def lines(self) -> Iterator[str]:
        """Yields the report as text, with escaped names; the last line is the verdict."""
        yield from self.faults()
        if self.unreferenced:
            yield printable(f"not part of the checkpoint: {some_of(self.unreferenced)}")
        if self.unverifiable:
            count = plural(len(self.unverifiable), "record")
            yield printable(f"not verifiable, {count}: {some_of(self.unverifiable)}")
        verdict = "no damage found"
        if not self.ok:
            parts = [
                (len(self.damaged), "location", "damaged"),
                (len(self.missing), "file", "missing"),
                (len(self.incomplete), "item", "incomplete"),
                (len(self.unread), "location", "not read"),
            ]
            verdict = ", ".join(f"{plural(n, noun)} {what}" for n, noun, what in parts if n)
        elif self.unverifiable:
            verdict = "no damage found, but some records lack checksums"
        rate = self.bytes / self.seconds / 1e9 if self.seconds else 0.0
        yield (
            f"{printable(self.checkpoint)}: {plural(self.records, 'record')}, {size(self.bytes)}, "
            f"{self.seconds:.2f} s, {rate:.2f} GB/s: {verdict}"
        )

    def document(self) -> dict[str, Any]:
        """Returns the report as a JSON document."""
        document = {"checkpoint": self.checkpoint, "ok": self.ok} | asdict(self)
        document["missing"] = [{"file": file, "names": names} for file, names in self.missing]
        document["incomplete"] = [{"name": name, "what": what} for name, what in self.incomplete]
        return document


def verify(
    checkpoint_id: str | os.PathLike[str],
    *,
    thread_count: int | None = None,
    max_inflight_bytes: int = 256 << 20,
    direct_io: bool | str = "auto",
    progress: ProgressOption = None,
    storage_options: Mapping[str, Any] | None = None,
) -> VerifyReport:
    """Reads an entire checkpoint and verifies it against all its checksums.

    Checkpoints written by stock torch are verified against the CRC-32 of each archive entry.
    Safetensors files have no checksums unless torch_ckpt saved them. Without checksums, only the
    headers and the lengths of the files are verified, and the tensors are listed as unverifiable.

    Args:
        checkpoint_id: a checkpoint directory. If a run is saved in ROOT, pass ``ROOT/40`` for step
            40, or ``ROOT`` for the newest step. Can also be a safetensors file, or a directory of
            safetensors files, or the URL of any of these.
        thread_count: number of concurrent reads; None means 8.
        max_inflight_bytes: memory limit in bytes, not counting the metadata.
        direct_io: bypass the page cache; "auto" does so only for data that is not cached.
        progress: see :data:`torch_ckpt._base.progress.ProgressOption`.
        storage_options: see :class:`torch_ckpt.ReadOptions`.

    Returns:
        All faults found; ``report.ok`` is True if there are none.

    Raises:
        FileNotFoundError: there is no committed checkpoint.
        Unsafe, Corrupt: the metadata cannot be read.
        OSError: the directory cannot be read, or a request to a store has failed.
        ValueError: an option is out of range.

    Example::

        report = torch_ckpt.verify("run/40")
        print(report)
    """
    options = ReadOptions(
        thread_count=thread_count, max_inflight_bytes=max_inflight_bytes, direct_io=direct_io
    )
    begun = time.perf_counter()
    folder, path, safetensors = open_checkpoint(checkpoint_id, storage_options)
    with closing(share_or_warn(folder)):
        report = VerifyReport(path)
        verification = _core.CheckpointVerification(folder)
        with folder.own_errors():
            if safetensors is not None:
                verification.add(read_safetensors(folder, safetensors).index)
            else:
                present = names_if_listed(folder)
                metadata = _metadata_names(present)
                for name in metadata:
                    index = read_index_in(folder, name)
                    if isinstance(folder, RemoteFolder):
                        folder.prepare(index.files())
                    verification.add(index)
                    del index  # It can be large.
                report.unreferenced = _unreferenced(folder, present, verification, metadata)
        report.records, total = verification.records, verification.bytes
        report.bytes = total
        title = f"verify {os.path.basename(os.path.normpath(report.checkpoint))}"
        with reporting(progress, title, None, total) as shown, folder.own_errors():
            verification.run(options, shown and (lambda done: shown(Progress(total, 0, done))))
    for fault in verification.faults:
        if fault.kind == _core.FaultKind.INCOMPLETE:
            report.incomplete.append((fault.name, fault.what))
            continue
        faults = report.unread if fault.kind == _core.FaultKind.UNREAD else report.damaged
        faults.append(Damage(fault.name or None, fault.file, fault.offset, fault.bytes, fault.what))
    report.missing = verification.missing
    report.unverifiable = verification.unverifiable
    report.seconds = time.perf_counter() - begun
    return report


def _metadata_names(present: list[str]) -> list[str]:
    """Returns the shared metadata file, or one per rank if ranks saved without collectives."""
    of_ranks = sorted(name for name in present if _METADATA_OF_RANK.match(name))
    return of_ranks if of_ranks and METADATA_NAME not in present else [METADATA_NAME]


def _unreferenced(
    folder: Folder,
    present: list[str],
    verification: _core.CheckpointVerification,
    metadata: list[str],
) -> list[str]:
    """Returns the files that no metadata names; ignores directories."""
    own = {*metadata, _core.LOCK_NAME}
    if STEP_NAME.match(os.path.basename(os.path.normpath(folder.path))):
        own |= {MARKER_NAME, PINNED_NAME}
    return sorted(
        name
        for name in present
        if name not in own and not verification.names_file(name) and folder.is_file(name)
    )
