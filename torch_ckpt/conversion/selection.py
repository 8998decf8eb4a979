"""Selects and renames the tensors of a source for ``convert``, and converts their dtype."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import Any

import torch

from torch_ckpt._base.formatting import some_of
from torch_ckpt.conversion.input import Entry, Input
from torch_ckpt.errors import CheckpointError
from torch_ckpt.huggingface.transformers_config import Config
from torch_ckpt.loading.renaming import Rename, new_names, new_path


class Selection(Input):
    """A view of another source that selects and renames its values, and converts their dtypes.

    Args:
        source: the other source; ``close()`` closes it, too.
        select: :mod:`fnmatch` patterns of the names to keep; None keeps all.
        strip_prefix: prefix to remove from names that begin with it.
        rename: how to rename the names after the prefix is removed.
        dtype: dtype for floating-point tensors; None keeps their dtypes.

    Raises:
        ValueError: a pattern or the prefix matches no name, or two values would get the same name.
    """

    def __init__(
        self,
        source: Input,
        *,
        select: Iterable[str] | None,
        strip_prefix: str | None,
        rename: Rename,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.format = source.format
        self.notes = source.notes
        self.metadata = source.metadata
        self._source = source
        self._dtype = dtype
        known = {*source.tensors, *source.objects}
        names = [name for name in source.paths if name in known]
        if select is not None:
            names = _select_names(names, select)
        new = dict(zip(names, names, strict=True))
        if strip_prefix:
            if "*" in strip_prefix:
                raise ValueError(f"strip_prefix must be a string without '*', got {strip_prefix!r}")
            new = new_names(names, {f"{strip_prefix}*": "*"}, "strip_prefix")
        renamed = new_names(new.values(), rename)
        #: Original name by new name.
        self._source_names = {renamed[stripped]: old for old, stripped in new.items()}
        for name, old in self._source_names.items():
            path = source.paths[old]
            self.paths[name] = path if name == old else new_path(path, old, name)
            if old in source.tensors:
                entry = source.tensors[old]
                self.tensors[name] = Entry(self._target_dtype(entry.dtype), entry.shape)
            else:
                self.objects.append(name)

    def _target_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self._dtype if self._dtype is not None and dtype.is_floating_point else dtype

    def read(self, names: list[str]) -> list[torch.Tensor]:
        if self._dtype is None:
            return self._source.read([self._source_names[name] for name in names])
        # Read one at a time: the caller's memory limit covers only the converted tensors.
        return [self._read(name) for name in names]

    def _read(self, name: str) -> torch.Tensor:
        [stored] = self._source.read([self._source_names[name]])
        dtype = self._target_dtype(stored.dtype)
        if dtype is stored.dtype:
            return stored
        try:
            tensor = stored.to(dtype)
        except RuntimeError as error:
            raise CheckpointError(
                f"{name}: {stored.dtype} cannot be converted to {dtype}: {error}"
            ) from error
        if torch.finfo(dtype).max < torch.finfo(stored.dtype).max:
            # torch does not implement isfinite() for 8-bit floats.
            before = stored.float() if stored.dtype.itemsize == 1 else stored
            if bool((before.isfinite() & ~tensor.float().isfinite()).any()):
                self.notes.append(
                    f"{name} has values that overflow {dtype} and became infinite or NaN"
                )
        return tensor

    def read_object(self, name: str) -> Any:
        return self._source.read_object(self._source_names[name])

    def close(self) -> None:
        self._source.close()


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
