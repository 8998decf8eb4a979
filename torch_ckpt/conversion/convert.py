"""``convert``: a model from one format to another, never all of it in memory.

1. The source is opened by its metadata: names, dtypes, shapes, and where each tensor lies; and what
   is not selected is forgotten.
2. What the target's format does not hold is refused by name, before anything is written.
3. Tensors are read and written some at a time, in the same bytes where no other dtype is wanted.
4. The target takes its name once it is complete and durable.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from torch_ckpt._base.formatting import plural, printable, size, some_of
from torch_ckpt._base.progress import Progress, ProgressOption, Reporter
from torch_ckpt.checkpoint.locating import TORCH_SUFFIXES
from torch_ckpt.conversion.selection import Selection, dtype_of
from torch_ckpt.conversion.source import Source
from torch_ckpt.conversion.sources import open_source
from torch_ckpt.conversion.targets import (
    Write,
    require_safetensors,
    write_dcp,
    write_safetensors,
    write_safetensors_shards,
)
from torch_ckpt.conversion.torch_target import write_torch
from torch_ckpt.conversion.transformers_config import Config, leave_out_tied
from torch_ckpt.errors import CheckpointError
from torch_ckpt.loading.renaming import Rename

# The most bytes of tensors in a file of a directory for transformers.
_SHARD_BYTES = 5 * 10**9

_NAMES = {"dcp": "a checkpoint directory", "torch": "torch.save", "safetensors": "safetensors"}


@dataclass
class ConvertReport:
    """What :func:`convert` did.

    Attributes:
        source, target: the paths.
        source_format, target_format: "dcp", "torch" or "safetensors".
        files: paths that were written; of a checkpoint its directory.
        tensors, objects: how many were written.
        bytes: of the tensors.
        seconds: that it took.
        notes: what the source has and the target has not: clauses for people.
    """

    source: str
    target: str
    source_format: str
    target_format: str
    files: list[str] = field(default_factory=list)
    tensors: int = 0
    objects: int = 0
    bytes: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """The whole report for people, with escaped names."""
        for note in self.notes:
            yield printable(f"note: {note}")
        parts = [plural(self.tensors, "tensor"), size(self.bytes), f"{self.seconds:.2f} s"]
        if self.objects:
            parts.insert(1, plural(self.objects, "object"))
        if self.files != [self.target]:
            parts.append(plural(len(self.files), "file"))
        yield printable(
            f"{self.source} ({_NAMES[self.source_format]}) is now {self.target} "
            f"({_NAMES[self.target_format]}): {', '.join(parts)}"
        )

    def document(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return asdict(self)


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    select: Iterable[str] | None = None,
    strip_prefix: str | None = None,
    rename: Rename = None,
    dtype: torch.dtype | str | None = None,
    config: str | os.PathLike[str] | None = None,
    max_shard_size: int | None = None,
    tensors_only: bool = False,
    overwrite: bool = False,
    allow_pickle: bool = False,
    max_host_bytes: int = 1 << 30,
    progress: ProgressOption = None,
) -> ConvertReport:
    """Converts between checkpoint directories, files of ``torch.save``, and safetensors.

    Tensors arrive bit for bit, where ``dtype`` is not given. Names of nested dicts and lists become
    "a.b.0" in safetensors, and are nested again in files of ``torch.save`` where the source is a
    checkpoint. There the values of :class:`torch_ckpt.AppState` are what their
    ``load_state_dict()`` takes.

    Args:
        source: a checkpoint directory of torch or of ours, ``ROOT/40`` for step 40 of a run or ROOT
            for its newest step, a file of ``torch.save``, a safetensors
            file, or a directory of such files with their index.
        target: ``*.safetensors``; ``*.pt``, ``*.pth`` or ``*.bin`` for ``torch.save``; else a
            checkpoint directory.
        select: patterns as of :mod:`fnmatch` of the names in the source to take, as
            ``["model.*"]``. None: all.
        strip_prefix: is taken away from the names that begin with it, as ``"model."``.
        rename: gives what is left of the names others: see :func:`torch_ckpt.load`.
        dtype: of floating point tensors, also as "bf16", "fp16" or "fp32". What becomes too large
            for it is noted.
        config: a ``config.json``, or a directory that has one, which is copied to the target, with
            ``dtype`` in it if that is given. The target is a directory of safetensors files then,
            of 5 GB at most if ``max_shard_size`` is not given: with the names of a model of
            ``transformers`` its ``from_pretrained`` loads that. If ``transformers`` is installed,
            weights that the model ties to others, and that equal them, are left out.
        max_shard_size: makes the target a directory of safetensors files with an index, none with
            more bytes of tensors, unless one tensor has more.
        tensors_only: leave out values that are not tensors.
        overwrite: replace what is there. It stays until the new one is complete.
        allow_pickle: unpickle whatever the source holds, which may run code; only from trusted
            writers.
        max_host_bytes: of tensors that are in memory at once; the largest one always is.
        progress: see :data:`torch_ckpt._base.progress.ProgressOption`.

    Raises:
        FileNotFoundError: there is no source.
        FileExistsError: there is something at the target.
        CheckpointError: the formats are the same and nothing else changes, or the target's does not
            hold what the source has, which is named; or ``config`` is not a JSON object.
        Corrupt, Unsafe: the source is damaged, or would run code.
        OSError: a system call failed. Nothing is left of the target.
        DurabilityUncertain: the target is complete, but may not be there after a power cut.
        ValueError: an option is out of range, a pattern matches no name, or two names become one.
    """
    for title, value in (("max_shard_size", max_shard_size), ("max_host_bytes", max_host_bytes)):
        if value is not None and value < 1:
            raise ValueError(f"{title} must be at least 1, got {value}")
    begun = time.perf_counter()
    path, place = os.fspath(source), os.fspath(target)
    to_dtype = None if dtype is None else dtype_of(dtype)
    names_file = _suffix(place) in (".safetensors", *TORCH_SUFFIXES)
    if names_file and (max_shard_size is not None or config is not None):
        option = "config" if max_shard_size is None else "max_shard_size"
        raise ValueError(f"{option} makes a directory, and {place} names a file")
    model_config = None if config is None else Config(os.fspath(config))
    target_format, write = _target(place, max_shard_size, model_config, to_dtype)
    is_changed = not (select is None and not strip_prefix and rename is None and dtype is None)
    if os.path.exists(place) and os.path.exists(path) and os.path.samefile(path, place):
        raise CheckpointError(f"{path} cannot be converted to itself")
    with ExitStack() as stack:
        opened = stack.enter_context(closing(open_source(path, allow_pickle)))
        if is_changed:
            opened = Selection(
                opened, select=select, strip_prefix=strip_prefix, rename=rename, dtype=to_dtype
            )
        report = ConvertReport(path, place, opened.format, target_format)
        if target_format == opened.format != "safetensors" and not is_changed:
            raise CheckpointError(
                f"{path} and {place} are both {_NAMES[target_format]}: there is nothing to convert"
            )
        notes = _left_out(opened, target_format, tensors_only)
        if target_format == "safetensors":
            require_safetensors(opened)
        if model_config is not None and (tied := leave_out_tied(opened, model_config)):
            notes.append(f"tied to other weights, of which they are copies: {some_of(tied)}")
        report.tensors, report.objects = len(opened.tensors), len(opened.objects)
        total = sum(entry.nbytes for entry in opened.tensors.values())
        with Reporter(progress, f"convert {os.path.basename(path)}", 0, total) as shown:

            def wrote(count: int) -> None:
                report.bytes += count
                shown.update(Progress(total, 0, report.bytes))

            report.files = write(
                opened, place, overwrite=overwrite, wave_bytes=max_host_bytes, wrote=wrote
            )
        report.notes = notes + opened.notes
    report.seconds = time.perf_counter() - begun
    return report


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def _target(
    path: str, max_shard_size: int | None, config: Config | None, dtype: torch.dtype | None
) -> tuple[str, Write]:
    suffix = _suffix(path)
    if max_shard_size is not None or config is not None:
        return "safetensors", partial(
            write_safetensors_shards,
            max_shard_size=max_shard_size or _SHARD_BYTES,
            config=None if config is None else config.text(dtype),
        )
    if suffix == ".safetensors":
        return "safetensors", write_safetensors
    if suffix in TORCH_SUFFIXES:
        return "torch", write_torch
    return "dcp", write_dcp


def _left_out(source: Source, target_format: str, tensors_only: bool) -> list[str]:
    """Leaves out what is not wanted; notes of what that is.

    Raises:
        CheckpointError: the target does not hold objects.
    """
    notes = []
    names = some_of(source.objects)
    if source.objects and tensors_only:
        notes.append(f"left out, since they are not tensors: {names}")
        source.objects.clear()
    elif source.objects and target_format == "safetensors":
        raise CheckpointError(
            f"safetensors files hold tensors only, and these are not tensors: {names}; "
            "tensors_only=True (--tensors-only) leaves them out"
        )
    if source.metadata and target_format != "safetensors":
        keys = ", ".join(sorted(source.metadata))
        notes.append(f"metadata of the safetensors file, which has no place here: {keys}")
    return notes
