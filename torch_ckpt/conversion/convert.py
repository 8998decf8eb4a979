"""``convert``: converts a model between formats without holding the entire model in memory.

1. Open the source, reading only names, dtypes, shapes and locations, and apply the selection.
2. Reject values that the target format cannot hold, before writing anything.
3. Read and write a few tensors at a time. Their bytes change only if a dtype is given.
4. Publish the target under its name once it is complete and durable.
"""

from __future__ import annotations

import fnmatch
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from torch_ckpt._base.checks import require_at_least
from torch_ckpt._base.formatting import Report, plural, printable, size, some_of
from torch_ckpt._base.progress import Progress, ProgressOption, reporting
from torch_ckpt.checkpoint.dtypes import parse_dtype
from torch_ckpt.checkpoint.locating import TORCH_SUFFIXES
from torch_ckpt.conversion.input import Entry, Input
from torch_ckpt.conversion.sources import open_source
from torch_ckpt.conversion.targets import (
    Output,
    Write,
    require_safetensors,
    write_dcp,
    write_model,
    write_safetensors,
)
from torch_ckpt.conversion.torch_target import write_torch
from torch_ckpt.errors import CheckpointError
from torch_ckpt.huggingface.model_target import SHARD_BYTES
from torch_ckpt.huggingface.transformers_config import Config
from torch_ckpt.loading.renaming import Rename, new_names, new_path

_NAMES = {"dcp": "a checkpoint directory", "torch": "torch.save", "safetensors": "safetensors"}


@dataclass
class ConvertReport(Report):
    """Result of :func:`convert`.

    Attributes:
        source, target: paths of the source and the target.
        source_format, target_format: "dcp", "torch" or "safetensors".
        files: paths of the files that were written; only the directory if the target is a
            checkpoint.
        tensors, objects: numbers of tensors and objects that were written.
        bytes: total size of the tensors.
        seconds: duration of the conversion.
        notes: differences between the source and the target, such as values that were left out.

    Example::

        report = torch_ckpt.convert("run/40", "model.safetensors", select=["model.*"])
        print(report.tensors, report.bytes, report.notes)
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
        """Yields the report as text, with escaped names."""
        for note in self.notes:
            yield printable(f"note: {note}")
        parts = [plural(self.tensors, "tensor"), size(self.bytes), f"{self.seconds:.2f} s"]
        if self.objects:
            parts.insert(1, plural(self.objects, "object"))
        if self.files != [self.target]:
            parts.append(plural(len(self.files), "file"))
        yield printable(
            f"converted {self.source} ({_NAMES[self.source_format]}) to {self.target} "
            f"({_NAMES[self.target_format]}): {', '.join(parts)}"
        )


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
    storage_options: Mapping[str, Any] | None = None,
) -> ConvertReport:
    """Converts between checkpoint directories, ``torch.save`` files and safetensors.

    Tensors are copied bit for bit unless ``dtype`` is given. In safetensors, nested values get
    names such as "a.b.0". If a checkpoint is converted to a ``torch.save`` file, the file has the
    nesting of the saved state dict, and the values that had a state become states that
    ``load_state_dict()`` accepts.

    Args:
        source: a checkpoint directory written by torch_ckpt or stock torch, a ``torch.save`` file,
            a safetensors file, or a directory of safetensors files with an index. If a run is saved
            in ROOT, pass ``ROOT/40`` for step 40, or ``ROOT`` for the newest step. Or the URL of
            any of these; the URL of a ``torch.save`` file must have one of the suffixes below.
        target: ``*.safetensors``; ``*.pt``, ``*.pth`` or ``*.bin`` for ``torch.save``; any other
            path for a checkpoint directory. Can be a URL.
        select: :mod:`fnmatch` patterns that select the names to convert, such as ``["model.*"]``.
            None converts all names.
        strip_prefix: prefix to remove from the names that begin with this prefix, such as
            ``"model."``.
        rename: how to rename the names after the prefix has been removed; see
            :func:`torch_ckpt.load`.
        dtype: dtype to convert floating-point tensors to: a torch dtype, its name, "bf16", "fp16"
            or "fp32". The report lists tensors whose values overflow.
        config: a ``config.json``, or a directory that contains one, to copy to the target. If
            ``dtype`` is given, the copied file states that dtype. The target becomes a directory of
            safetensors files, which ``from_pretrained`` of ``transformers`` can load if the tensor
            names match the model's. If ``transformers`` is installed, each weight that the model
            ties to another weight is left out if both weights are equal.
        max_shard_size: maximum number of bytes of tensors per file; a larger tensor gets a file of
            its own. If this option is given, the target becomes a directory of safetensors files
            with an index. If ``config`` is given, the default is 5 GB.
        tensors_only: leave out values that are not tensors.
        overwrite: replace an existing target, which is kept until the new one is complete.
        allow_pickle: unpickle objects of any type. Unpickling can run code from the source, so use
            this option only for trusted sources.
        max_host_bytes: maximum number of bytes of tensors to hold in memory. A tensor larger than
            the limit is read on its own.
        progress: see :data:`torch_ckpt._base.progress.ProgressOption`.
        storage_options: see :class:`torch_ckpt.ReadOptions`; for source and target.

    Raises:
        FileNotFoundError: the source does not exist.
        FileExistsError: the target exists, is not an empty directory, and ``overwrite`` is False.
        CheckpointError: source and target have the same format and no option changes anything, or
            ``config`` is not a JSON object.
        CheckpointError: the target format cannot hold a value; the message names the value.
        Corrupt, Unsafe: the source is damaged, or loading it would run code.
        OSError: a system call or a request failed. The incomplete target has been removed.
        NotCommitted: the target was not published, and has been removed.
        DurabilityUncertain: the target is complete, but a power failure could still destroy it; or
            it is unknown whether the last request to a URL has published the target.
        ValueError: an option is out of range, a pattern matches no name, or two values would get
            the same name.

    Example::

        torch_ckpt.convert(
            "run/40", "model.safetensors", select=["model.*"], strip_prefix="model.", dtype="bf16"
        )
    """
    for title, value in (("max_shard_size", max_shard_size), ("max_host_bytes", max_host_bytes)):
        if value is not None:
            require_at_least(title, value, 1)
    begun = time.perf_counter()
    path, target_path = os.fspath(source), os.fspath(target)
    to_dtype = None if dtype is None else parse_dtype(dtype)
    is_file = _suffix(target_path) in (".safetensors", *TORCH_SUFFIXES)
    if is_file and (max_shard_size is not None or config is not None):
        option = "config" if max_shard_size is None else "max_shard_size"
        raise ValueError(
            f"{option} writes a directory, but {target_path} has a file suffix. Pass a directory "
            "path as the target"
        )
    config_path = None if config is None else os.fspath(config)
    model_config = None if config_path is None else Config(config_path)
    target_format, write = _choose_target(target_path, max_shard_size, config_path, to_dtype)
    is_changed = not (select is None and not strip_prefix and rename is None and dtype is None)
    exist = os.path.exists(target_path) and os.path.exists(path)
    if path == target_path or (exist and os.path.samefile(path, target_path)):
        raise CheckpointError(f"source and target are the same: {path}")
    with ExitStack() as stack:
        opened = stack.enter_context(closing(open_source(path, allow_pickle, storage_options)))
        if is_changed:
            select_values(
                opened, select=select, strip_prefix=strip_prefix, rename=rename, dtype=to_dtype
            )
        report = ConvertReport(path, target_path, opened.format, target_format)
        if target_format == opened.format != "safetensors" and not is_changed:
            raise CheckpointError(
                f"{path} and {target_path} are both {_NAMES[target_format]}, so nothing would "
                "change. Pass select, strip_prefix, rename or dtype to change the contents, or a "
                "target that ends in .pt or .safetensors to change the format"
            )
        notes = _drop_objects(opened, target_format, tensors_only)
        if target_format == "safetensors":
            require_safetensors(opened)
        if model_config is not None and (tied := leave_out_tied(opened, model_config)):
            notes.append(f"left out because the model ties them to equal weights: {some_of(tied)}")
        report.tensors, report.objects = len(opened.tensors), len(opened.objects)
        total = sum(entry.nbytes for entry in opened.tensors.values())
        with reporting(progress, f"convert {os.path.basename(path)}", 0, total) as shown:

            def wrote(count: int) -> None:
                report.bytes += count
                if shown is not None:
                    shown(Progress(total, 0, report.bytes))

            output = Output(target_path, overwrite, max_host_bytes, storage_options, wrote)
            report.files = write(opened, output)
        report.notes = notes + opened.notes
    report.seconds = time.perf_counter() - begun
    return report


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def _choose_target(
    path: str, max_shard_size: int | None, config: str | None, dtype: torch.dtype | None
) -> tuple[str, Write]:
    """Returns the target's format and the function that writes it."""
    suffix = _suffix(path)
    if max_shard_size is not None or config is not None:
        most = max_shard_size or SHARD_BYTES
        return "safetensors", partial(write_model, max_shard_size=most, config=config, dtype=dtype)
    if suffix == ".safetensors":
        return "safetensors", write_safetensors
    if suffix in TORCH_SUFFIXES:
        return "torch", write_torch
    return "dcp", write_dcp


def _drop_objects(source: Input, target_format: str, tensors_only: bool) -> list[str]:
    """Removes a source's objects if only tensors are to be converted.

    Returns:
        Notes about objects and metadata that the target lacks.

    Raises:
        CheckpointError: the target format cannot hold objects.
    """
    notes = []
    names = some_of(source.objects)
    if source.objects and tensors_only:
        notes.append(f"left out because they are not tensors: {names}")
        source.objects.clear()
    elif source.objects and target_format == "safetensors":
        raise CheckpointError(
            f"safetensors files hold only tensors, but these values are not tensors: {names}. Pass "
            "tensors_only=True (--tensors-only) to leave them out"
        )
    if source.metadata and target_format != "safetensors":
        keys = ", ".join(sorted(source.metadata))
        notes.append(f"left out the metadata of the safetensors file: {keys}")
    return notes


# --- the choice of values -------------------------------------------------------------------------


def select_values(
    source: Input,
    *,
    select: Iterable[str] | None,
    strip_prefix: str | None,
    rename: Rename,
    dtype: torch.dtype | None,
) -> None:
    """Selects and renames the values of a source, and sets the dtype of floating-point tensors.

    Args:
        select: :mod:`fnmatch` patterns of the names to keep; None keeps all.
        strip_prefix: prefix to remove from names that begin with it.
        rename: how to rename the names after the prefix is removed.
        dtype: dtype for floating-point tensors; None keeps their dtypes.

    Raises:
        ValueError: a pattern or the prefix matches no name, or two values would get the same name.
    """
    tensors, objects, paths = source.tensors, set(source.objects), source.paths
    names = [name for name in paths if name in tensors or name in objects]
    if select is not None:
        names = _select_names(names, select)
    new = dict(zip(names, names, strict=True))
    if strip_prefix:
        if "*" in strip_prefix:
            raise ValueError(f"strip_prefix must be a string without '*', got {strip_prefix!r}")
        new = new_names(names, {f"{strip_prefix}*": "*"}, "strip_prefix")
    renamed = new_names(new.values(), rename)
    stored = {renamed[stripped]: old for old, stripped in new.items()}
    source.stored_names, source.dtype = stored, dtype
    source.paths = {
        name: paths[old] if name == old else new_path(paths[old], old, name)
        for name, old in stored.items()
    }
    source.objects = [name for name, old in stored.items() if old in objects]
    source.tensors = {name: tensors[old] for name, old in stored.items() if old in tensors}
    if dtype is not None:
        for name, entry in source.tensors.items():
            if entry.dtype.is_floating_point:
                source.tensors[name] = Entry(dtype, entry.shape)


def _select_names(names: list[str], select: Iterable[str]) -> list[str]:
    if isinstance(select, str):
        raise ValueError(f"select must be a list of patterns, got the string {select!r}")
    patterns = list(select)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"select: no name matches {pattern!r}; the source has {some_of(names)}"
            )
    return [name for name in names if any(fnmatch.fnmatchcase(name, p) for p in patterns)]


def leave_out_tied(source: Input, config: Config) -> list[str]:
    """Removes weights that the model ties to others and that equal another weight bit for bit.

    ``from_pretrained`` ties them again.

    Returns:
        The names of the removed weights.
    """
    tied = config.tied_names(list(source.tensors))
    kept = source.tensors.keys() - set(tied)
    removed = []
    for name in tied:
        entry = source.tensors[name]
        if any(
            source.tensors[other] == entry and _are_equal(*source.read([name, other]))
            for other in source.tensors
            if other in kept
        ):
            removed.append(name)
    for name in removed:
        del source.tensors[name]
    return removed


def _are_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
