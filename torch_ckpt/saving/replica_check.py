"""Finds values that ranks should have in common and that differ between them.

A plain tensor (no DTensor), a number or another object that several ranks have under one name is
written by one of them. If it differs, because replicas have drifted apart or because each rank has
its own, the values of the other ranks are lost. Every rank posts checksums with its plan, and the
coordinator compares them.
"""

from __future__ import annotations

import pickle
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch

from torch_ckpt import _C, _core
from torch_ckpt._base.formatting import plural, ranks_text
from torch_ckpt._base.options import require_choice
from torch_ckpt._base.trees import BITS, as_bytes, host_pieces
from torch_ckpt.checkpoint.objects import PLAIN

#: How to look.
MODES = ("off", "warn", "error")

# Of a tensor that is larger only stripes are looked at at every save.
_SAMPLE_BYTES = 64 << 10
_STRIPES = 16

# The end of the name of what a value of an AppState holds beside tensors (state/trees.py).
_OBJECTS = "._objects"


class ReplicaCheck:
    """Chooses the saves of a run that compare replicas. Every rank counts the same saves.

    Args:
        mode: "off", "warn" or "error".
        every: compare at every save of so many; the first is one of them.

    Raises:
        ValueError: there is no such mode, or ``every`` is not positive.
    """

    def __init__(self, mode: str, every: int) -> None:
        require_choice("check_replicas", mode, MODES)
        if every < 1:
            raise ValueError(f"check_replicas_every must be at least 1, got {every}")
        self._mode = mode
        self._every = every
        self._saves = 0

    def next_mode(self) -> str:
        """The mode of the next save. Call it once for each save."""
        saves, self._saves = self._saves, self._saves + 1
        return self._mode if saves % self._every == 0 else "off"


def checksums_of(tensors: Iterable[torch.Tensor], objects: Iterable[Any], mode: str) -> bytes:
    """A checksum of 4 bytes for each tensor, then for each object; 0 for what is not compared.

    Tensors that are not plain are not compared, nor objects that contain themselves or cannot be
    pickled.

    Args:
        mode: "error" reads all of a tensor. "warn" reads all of a tensor up to 64 KiB, and 16
            stripes of 4 KiB, evenly spread, of a larger one: what is private to a rank differs
            there, too. Objects are read completely.
    """
    given = list(tensors)
    found: list[int | None] = [None] * len(given)
    if mode != "error":
        found = _C.checksums_of_samples(given, _SAMPLE_BYTES, _STRIPES)
    for number, tensor in enumerate(given):
        if found[number] is None:
            whole = mode == "error" or tensor.nbytes <= _SAMPLE_BYTES
            of_tensor = _checksum if whole else _checksum_of_sample
            found[number] = of_tensor(tensor) if _C.is_plain(tensor) else 0
    sums = cast(list[int], found) + [_checksum_of_object(value) for value in objects]
    return array("I", sums).tobytes()


def differing_values(names: list[list[str]], checksums: list[bytes | None]) -> list[str]:
    """What differs, one line for each name, from each rank's names and its checksums of these."""
    brought: list[dict[str, int]] = []
    for of_rank, data in zip(names, checksums, strict=True):
        sums = array("I")
        sums.frombytes(data or b"")
        brought.append(dict(zip(of_rank, sums, strict=False)))
    if all(of_rank == brought[0] for of_rank in brought):
        return []
    return _compare(brought)


def described(lines: list[str]) -> str:
    """Describes what differs and what to do, for an error or a warning; empty without lines."""
    if not lines:
        return ""
    shown = "; ".join(lines[:10]) + ("; and more" if len(lines) > 10 else "")
    verb = "differs" if len(lines) == 1 else "differ"
    return (
        f"{plural(len(lines), 'value')} {verb} between ranks, and only one rank's would be saved "
        f"for all: {shown}. Wrap a value that each rank has for itself in torch_ckpt.PerRank(...), "
        "or save it under a name of its own; a replica that has drifted apart needs its cause "
        "found. check_replicas='off' does not compare"
    )


def _checksum_of_object(value: Any) -> int:
    try:
        if type(value) in PLAIN:
            return zlib.crc32(f"{type(value).__name__} {value!r}".encode(errors="surrogatepass"))
        target = _Checksum()
        _Digest(target).dump(value)
    except Exception:
        # It contains itself; or the rank that saves it raises the error.
        return 0
    return target.crc


class _Checksum:
    """A file that keeps only the checksum of what is written."""

    def __init__(self) -> None:
        self.crc = 0

    def write(self, data: bytes) -> None:
        self.crc = zlib.crc32(data, self.crc)


class _Digest(pickle.Pickler):
    """Pickles an object so that equal objects of different processes have equal pickles.

    Equal objects may share parts in different ways, and sets have no order. So nothing is
    memoized, the items of a set are sorted by their checksums, and tensors count by value.
    """

    def __init__(self, target: _Checksum) -> None:
        super().__init__(target, protocol=4)
        self.fast = True

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, set | frozenset):
            return type(value).__name__, sorted(map(_checksum_of_object, value))
        if isinstance(value, torch.Tensor):
            crc = _checksum(value) if _C.is_plain(value) else 0
            return str(value.dtype), tuple(value.shape), crc
        return None


def _checksum_of_sample(tensor: torch.Tensor) -> int:
    """That of the positions that the engine looks at, of which alone copies are made."""
    bits = tensor.detach().resolve_conj().resolve_neg()
    bits = bits.view(BITS[tensor.itemsize]) if tensor.itemsize in BITS else bits
    length = _SAMPLE_BYTES // _STRIPES // tensor.itemsize
    last = tensor.numel() - length
    begins = [last * stripe // (_STRIPES - 1) for stripe in range(_STRIPES)]
    first = torch.tensor(begins, device="cpu").unsqueeze(1)
    indices = first + torch.arange(length, device="cpu")
    return _checksum(torch.take(bits, indices.to(tensor.device)))


def _checksum(tensor: torch.Tensor) -> int:
    # Against drift, not against forgery: this one is several times as fast as those that withstand
    # that, and one change in four billion is seen at the next look.
    crc = 0
    for piece in host_pieces(as_bytes(tensor)):
        crc = _core.crc32(piece, crc)
    return crc


def _compare(brought: Sequence[Mapping[str, object]]) -> list[str]:
    lines = []
    for name in sorted({name for of_rank in brought for name in of_rank}):
        holders: dict[object, list[int]] = {}
        for rank, of_rank in enumerate(brought):
            if name in of_rank:
                holders.setdefault(of_rank[name], []).append(rank)
        # What one rank cannot compare is not known to differ.
        holders.pop(0, None)
        if len(holders) > 1:
            groups = sorted(holders.values())
            others = "; ".join(f"another on {ranks_text(ranks)}" for ranks in groups[1:])
            lines.append(
                f"{name.removesuffix(_OBJECTS)} has one value on {ranks_text(groups[0])}; {others}"
            )
    return lines
