"""Selects and renames the values of a source for ``convert``."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

import torch

from torch_ckpt._base.formatting import some_of
from torch_ckpt.conversion.input import Entry, Input
from torch_ckpt.huggingface.transformers_config import Config
from torch_ckpt.loading.renaming import Rename, new_names, new_path


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
