"""What ``convert`` takes of a source: some of its names, by other ones, in another dtype."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import Any

import torch

from torch_ckpt._base.formatting import some_of
from torch_ckpt.conversion.source import Entry, Source
from torch_ckpt.errors import CheckpointError
from torch_ckpt.loading.renaming import Rename, new_names, new_path

#: Names of dtypes that are shorter than torch's.
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


class Selection(Source):
    """A part of a source.

    Args:
        source: it; closed with this.
        select: patterns as of :mod:`fnmatch` of the names to take; None: all.
        strip_prefix: is taken away where a name begins with it.
        rename: gives what is left of the names others.
        dtype: of floating point tensors; None: what they have.

    Raises:
        ValueError: a pattern or the prefix matches nothing, or two names become one.
    """

    def __init__(
        self,
        source: Source,
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
            names = _selected(names, select)
        new = dict(zip(names, names, strict=True))
        if strip_prefix:
            if "*" in strip_prefix:
                raise ValueError(f"strip_prefix must be a string without '*', got {strip_prefix!r}")
            new = new_names(names, {f"{strip_prefix}*": "*"}, "strip_prefix")
        renamed = new_names(new.values(), rename)
        #: The old name of each new one.
        self._old = {renamed[stripped]: old for old, stripped in new.items()}
        for name, old in self._old.items():
            path = source.paths[old]
            self.paths[name] = path if name == old else new_path(path, old, name)
            if old in source.tensors:
                entry = source.tensors[old]
                self.tensors[name] = Entry(self._converted(entry.dtype), entry.shape)
            else:
                self.objects.append(name)

    def _converted(self, dtype: torch.dtype) -> torch.dtype:
        return self._dtype if self._dtype is not None and dtype.is_floating_point else dtype

    def read(self, names: list[str]) -> list[torch.Tensor]:
        if self._dtype is None:
            return self._source.read([self._old[name] for name in names])
        # One by one: the limit on memory counts them in the dtype that they get.
        return [self._read(name) for name in names]

    def _read(self, name: str) -> torch.Tensor:
        [stored] = self._source.read([self._old[name]])
        dtype = self._converted(stored.dtype)
        if dtype is stored.dtype:
            return stored
        try:
            tensor = stored.to(dtype)
        except RuntimeError as error:
            raise CheckpointError(
                f"{name}: {stored.dtype} cannot be converted to {dtype}: {error}"
            ) from error
        if torch.finfo(dtype).max < torch.finfo(stored.dtype).max:
            # Nothing else is known of the narrow ones.
            before = stored.float() if stored.dtype.itemsize == 1 else stored
            if bool((before.isfinite() & ~tensor.float().isfinite()).any()):
                self.notes.append(f"values of {name} are too large for {dtype}, and not finite now")
        return tensor

    def object(self, name: str) -> Any:
        return self._source.object(self._old[name])

    def close(self) -> None:
        self._source.close()


def _selected(names: list[str], select: Iterable[str]) -> list[str]:
    if isinstance(select, str):
        raise ValueError(f"select must be a list of patterns, got the string {select!r}")
    patterns = list(select)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"select: no name matches {pattern!r}; there are {some_of(names)}")
    return [name for name in names if any(fnmatch.fnmatchcase(name, p) for p in patterns)]


def dtype_of(dtype: torch.dtype | str) -> torch.dtype:
    """A floating point dtype by its name: "bf16", "bfloat16", "float8_e4m3fn".

    Raises:
        ValueError: it is not one.
    """
    found = getattr(torch, _SHORT.get(dtype, dtype), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(
            f"dtype must be a floating-point dtype such as bf16, fp16 or fp32, got {dtype!r}"
        )
    return found
