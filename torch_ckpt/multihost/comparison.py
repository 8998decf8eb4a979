"""Whether all ranks are at the same point, and have the same values.

1. Every rank brings one digest of what must be the same everywhere, and one for each part of
   DTensors that it holds, which must be the same on all ranks that hold it.
2. Only where they differ, ranks bring a description and a checksum of each leaf.
3. Pickles of equal objects may differ. So the coordinator compares objects themselves then.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torch_ckpt._base.formatting import ranks_text
from torch_ckpt._base.trees import (
    Tree,
    array_bytes,
    as_bytes,
    differences,
    digest,
    host_pieces,
    is_array,
    is_strided,
    kind,
)
from torch_ckpt.ranks.calls import Call, Disagreement
from torch_ckpt.ranks.meeting import TIMEOUT_SECONDS

# Values that are written in an error.
_SHORT = 60

# Not every dtype has numbers that Python knows.
_SHOWN = (
    *(
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex128,
        torch.complex64,
    ),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)

_PLAIN = (bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def sync_global_devices(
    name: str,
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = TIMEOUT_SECONDS,
) -> None:
    """Returns when every rank of the group has called it, and the work on its GPU is done.

    Args:
        name: of this point of the program, the same on all ranks.
        process_group: None for the default group.
        timeout: seconds; a rank that has not come by then is given up.

    Raises:
        RanksDisagree: ranks came with different names, or to different functions of this package;
            on every rank, with who came to which.
        TimeoutError: ranks did not come; they are named.
        ConnectionError: the store is lost.
        ValueError: this process is not in the group.
    """

    def finish() -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()

    with Call(f"sync_global_devices({name!r})", process_group, timeout) as call:
        call.all_succeed(finish)


def assert_equal(
    tree: Any,
    message: str = "",
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = TIMEOUT_SECONDS,
) -> None:
    """Raises on every rank unless all have the same tree, bit for bit.

    A NaN equals one of the same bits; zeros of different signs differ. Devices, strides and
    ``requires_grad`` may differ, and so may the order of a dict's keys; types may not. Of DTensors
    the descriptions are compared, and each shard among the ranks that hold it. Objects that are not
    tensors, arrays or numbers are equal where their pickles are, or where they are by ``==``.

    Values stay where they are: ranks exchange checksums (blake2b, 128 bits), and where these
    differ also pickles of objects.

    Args:
        message: begins the error; ranks may have different ones.
        process_group: None for the default group.
        timeout: seconds; a rank that has not come by then, and is not computing checksums, is
            given up.

    Raises:
        RanksDisagree: an AssertionError that names leaves and ranks.
        TimeoutError: ranks did not come; they are named.
        ConnectionError: the store is lost.
        ValueError: this process is not in the group.
    """
    with Call("assert_equal()", process_group, timeout) as call:
        summary = _Summary()
        with call.alive(lambda: summary.bytes_done):
            outcome = call.exchange(lambda: summary.of(tree), _compare_digests)
        if outcome == "same":
            return
        begin = f"{message}: " if message else ""
        call.exchange(summary.details, _compare_details(begin))


@dataclass
class _Details:
    """Of each leaf what it is; of values of this rank, their checksums and pickles.

    Attributes:
        described: by name, what every leaf is; short values are included.
        checksums: by part and name.
        pickles: by name, of objects.
    """

    described: dict[str, str] = field(default_factory=dict)
    checksums: dict[str, dict[str, str]] = field(default_factory=dict)
    pickles: dict[str, bytes] = field(default_factory=dict)


class _Summary:
    """What a rank says of its tree."""

    def __init__(self) -> None:
        self.bytes_done = 0
        self._details = _Details()

    def of(self, tree: Any) -> dict[str, bytes]:
        """A digest for each part; part "" is what all ranks have."""
        taken = Tree(tree)
        details = self._details
        described = []
        for name, leaf in zip(taken.names, taken.leaves, strict=True):
            what, data = self._described(name, leaf)
            described.append(what)
            part = _part(leaf)
            if part is not None:
                details.checksums.setdefault(part, {})[name] = data
        details.described = taken.described(described)
        digests = {part: digest(of) for part, of in details.checksums.items()}
        # Objects' texts differ where the objects may yet be equal: only their pickles count here.
        whole = digest(details.described) + digests.get("", b"")
        return {**digests, "": whole}

    def details(self) -> _Details:
        return self._details

    def _described(self, name: str, leaf: Any) -> tuple[str, str]:
        """What a leaf is, and the checksum of its value."""
        if isinstance(leaf, DTensor):
            return kind(leaf), self._checksum(as_bytes(leaf.to_local()))
        if is_strided(leaf):
            data = self._checksum(as_bytes(leaf))
            shown = f" {leaf.detach().tolist()}" if not leaf.dim() and leaf.dtype in _SHOWN else ""
            return f"{kind(leaf)}{shown and ',' + shown}", data
        if is_array(leaf):
            return kind(leaf), self._checksum(array_bytes(leaf))
        of = type(leaf)
        type_name = of.__name__ if of.__module__ == "builtins" else f"{of.__module__}.{of.__name__}"
        if of in (float, complex):
            number = complex(leaf)
            return f"{type_name} {leaf!r}", struct.pack("<dd", number.real, number.imag).hex()
        if of in _PLAIN:
            text = repr(leaf)
            shown = text if len(text) <= _SHORT else f"{text[:_SHORT]}..."
            return f"{type_name} {shown}", hashlib.blake2b(text.encode()).hexdigest()
        pickled = pickle.dumps(leaf)
        self._details.pickles[name] = pickled
        return type_name, hashlib.blake2b(pickled, digest_size=16).hexdigest()

    def _checksum(self, data: torch.Tensor) -> str:
        found = hashlib.blake2b(digest_size=16)
        for piece in host_pieces(data):
            found.update(piece)
            self.bytes_done += len(piece)
        return found.hexdigest()


def _part(leaf: Any) -> str | None:
    """Who must have the same bytes as this rank: those with the same part; "" for all ranks.

    None where everybody's may differ.
    """
    if not isinstance(leaf, DTensor):
        return ""
    if any(placement.is_partial() for placement in leaf.placements):
        return None
    place = leaf.device_mesh.get_coordinate()
    if place is None:
        return None
    shard = [at for at, by in zip(place, leaf.placements, strict=True) if not by.is_replicate()]
    mesh = hashlib.blake2b(repr(leaf.device_mesh.mesh.tolist()).encode(), digest_size=8)
    placements = repr(leaf.placements)
    return f"{shard} {mesh.hexdigest()} {placements}"


def _compare_digests(brought: list[dict[str, bytes]]) -> str:
    seen: dict[str, bytes] = {}
    for digests in brought:
        for part, of in digests.items():
            if seen.setdefault(part, of) != of:
                return "different"
    return "same"


def _compare_details(begin: str) -> Callable[[list[_Details]], Disagreement | None]:
    def compare(brought: list[_Details]) -> Disagreement | None:
        described = [details.described for details in brought]
        lines = differences(described)
        kinds = {name for name in described[0] if len({d.get(name) for d in described}) == 1}
        by_part: dict[str, dict[str, list[int]]] = {}
        for rank, details in enumerate(brought):
            for part, checksums in details.checksums.items():
                for name in checksums:
                    by_part.setdefault(part, {}).setdefault(name, []).append(rank)
        for part, names in by_part.items():
            for name, ranks in names.items():
                groups = _groups(brought, part, name, ranks)
                if name in kinds and len(groups) > 1:
                    said = "; ".join(
                        f"{'one value' if not number else 'another'} on {ranks_text(group)}"
                        for number, group in enumerate(groups)
                    )
                    what = described[0][name]
                    where = f", its shard {part.split(']')[0]}]" if part.startswith("[") else ""
                    lines.append(f"{name or 'the tree'} ({what}{where}) has {said}")
        if not lines:
            return None
        count = "1 leaf" if len(lines) == 1 else f"{len(lines)} leaves"
        return Disagreement(f"{begin}ranks differ in {count}:", lines)

    return compare


def _groups(brought: list[_Details], part: str, name: str, ranks: list[int]) -> list[list[int]]:
    """Ranks with the same value together."""
    by_checksum: dict[str, list[int]] = {}
    for rank in ranks:
        by_checksum.setdefault(brought[rank].checksums[part][name], []).append(rank)
    groups = list(by_checksum.values())
    if len(groups) == 1 or any(name not in brought[rank].pickles for rank in ranks):
        return groups
    merged: list[tuple[Any, list[int]]] = []
    for group in groups:
        value = pickle.loads(brought[group[0]].pickles[name])
        for other, others in merged:
            if _equal(value, other):
                others.extend(group)
                break
        else:
            merged.append((value, group))
    return [group for _value, group in merged]


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # as arrays inside of objects do
        return False
