"""Finds values that should be identical on several ranks but differ.

If several ranks have a plain tensor (not a DTensor), a number or another object with the same name,
only one of the ranks writes it. If the values differ, because replicas have diverged or because
each rank has its own value, the values of the other ranks are lost. So every rank sends checksums
with its plan, and the coordinator compares them.
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
from torch_ckpt.checkpoint.objects import PLAIN
from torch_ckpt.checkpoint.tensor_bytes import BITS, as_bytes, host_pieces

#: Values of the option check_replicas.
MODES = ("off", "warn", "error")

# In the mode "warn", only stripes of larger tensors are compared.
_SAMPLE_BYTES = 64 << 10
_STRIPES = 16

# AppState saves the parts of a value that are not tensors under a name with this suffix
# (state/splitting.py).
_OBJECTS = "._objects"


def checksums_of(tensors: Iterable[torch.Tensor], objects: Iterable[Any], mode: str) -> bytes:
    """Returns a 4-byte checksum for each tensor, followed by one for each object.

    The checksum is 0 for values that are not compared: tensors that are not plain, objects that
    contain themselves, and objects that cannot be pickled.

    Args:
        mode: "error" reads all bytes of every tensor. "warn" reads all bytes of tensors up to 64
            KiB, and 16 evenly spaced stripes of 4 KiB from larger tensors, which is enough to
            detect that each rank has its own value. Objects are always read completely.
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
    """Compares the checksums of all ranks. Returns one line for each name whose values differ.

    Args:
        names: the names of each rank's values.
        checksums: the result of :func:`checksums_of` on each rank; None if a rank sent none.
    """
    brought: list[dict[str, int]] = []
    for of_rank, data in zip(names, checksums, strict=True):
        sums = array("I")
        sums.frombytes(data or b"")
        brought.append(dict(zip(of_rank, sums, strict=False)))
    if all(of_rank == brought[0] for of_rank in brought):
        return []
    return _compare(brought)


def described(lines: list[str]) -> str:
    """Returns the text of an error or a warning about differing values. Empty if there are no
    lines."""
    if not lines:
        return ""
    shown = "; ".join(lines[:10]) + (f"; and {len(lines) - 10} more" if len(lines) > 10 else "")
    verb = "differs" if len(lines) == 1 else "differ"
    return (
        f"{plural(len(lines), 'value')} {verb} between ranks, but only one rank's values are "
        f"saved: {shown}. If each rank has its own value, wrap it in torch_ckpt.PerRank(...) or "
        "save it under a different name on each rank. If the values are replicas, find out why "
        "they diverged. Pass check_replicas='off' to skip this comparison"
    )


def _checksum_of_object(value: Any) -> int:
    try:
        if type(value) in PLAIN:
            return zlib.crc32(f"{type(value).__name__} {value!r}".encode(errors="surrogatepass"))
        target = _Checksum()
        _Digest(target).dump(value)
    except Exception:
        # The object contains itself or cannot be pickled. In the latter case, the rank that saves
        # it raises the error.
        return 0
    return target.crc


class _Checksum:
    """A file object that only computes the checksum of the bytes written to it."""

    def __init__(self) -> None:
        self.crc = 0

    def write(self, data: bytes) -> None:
        self.crc = zlib.crc32(data, self.crc)


class _Digest(pickle.Pickler):
    """Pickles objects so that equal objects have equal pickles in different processes.

    Equal objects may share parts in different ways, and sets have no defined order. So nothing is
    memoized, the items of sets are sorted by checksum, and tensors are compared by value.
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
    """Returns the checksum of the same stripes that the engine reads, copying only the stripes."""
    bits = tensor.detach().resolve_conj().resolve_neg()
    bits = bits.view(BITS[tensor.itemsize]) if tensor.itemsize in BITS else bits
    length = _SAMPLE_BYTES // _STRIPES // tensor.itemsize
    last = tensor.numel() - length
    begins = [last * stripe // (_STRIPES - 1) for stripe in range(_STRIPES)]
    first = torch.tensor(begins, device="cpu").unsqueeze(1)
    indices = first + torch.arange(length, device="cpu")
    return _checksum(torch.take(bits, indices.to(tensor.device)))


def _checksum(tensor: torch.Tensor) -> int:
    # A CRC suffices, because it must detect drift, not forgery. It is several times as fast as a
    # cryptographic hash, and misses one change in four billion, which the next comparison finds.
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
        # 0 means that the value is not compared.
        holders.pop(0, None)
        if len(holders) > 1:
            groups = sorted(holders.values())
            verb = "has" if len(groups[0]) == 1 else "have"
            others = "".join(f", {ranks_text(ranks)} another" for ranks in groups[1:])
            lines.append(
                f"{name.removesuffix(_OBJECTS)}: {ranks_text(groups[0])} {verb} one value{others}"
            )
    return lines
