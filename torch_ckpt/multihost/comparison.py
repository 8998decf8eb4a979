"""Checks that all ranks are at the same point of the program, and that they have equal values.

1. Every rank sends a digest of the values that must be equal on all ranks. For each DTensor shard
   that it holds, it also sends a digest, which must be equal on all ranks that hold this shard.
2. If digests differ, ranks send a description and a checksum of each leaf.
3. Pickles of equal objects may differ, so the coordinator then compares the objects themselves.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torch_ckpt._base.formatting import ranks_text
from torch_ckpt.checkpoint.tensor_bytes import as_bytes, host_pieces
from torch_ckpt.multihost.trees import (
    Tree,
    array_bytes,
    differences,
    digest,
    is_array,
    is_strided,
    kind,
)
from torch_ckpt.ranks.collective_call import CollectiveCall, Disagreement
from torch_ckpt.ranks.group import TIMEOUT_SECONDS

# Maximum number of characters of a value that an error shows.
_MAX_CHARACTERS = 60

# Dtypes whose scalars are shown in errors. Not every dtype can be converted to Python numbers.
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
    """Waits until all ranks of the group have called this function and their GPUs have finished all
    work.

    Args:
        name: name of this point in the program, the same on all ranks.
        process_group: the ranks to synchronize; None means the default group.
        timeout: seconds to wait for ranks that have not arrived.

    Raises:
        RanksDisagree: ranks passed different names, or called different functions of this package.
            Raised on every rank; the message lists the call of each rank.
        TimeoutError: a rank did not arrive; the message names the rank.
        ConnectionError: the connection to the store is lost.
        ValueError: this process is not in the group.

    Example::

        multihost.sync_global_devices("dataset downloaded")
    """

    def finish() -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()

    with CollectiveCall(f"sync_global_devices({name!r})", process_group, timeout) as call:
        call.run_on_all(finish)


def assert_equal(
    tree: Any,
    message: str = "",
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = TIMEOUT_SECONDS,
) -> None:
    """Raises an error on every rank unless all ranks pass the same tree, bit for bit.

    NaNs are equal if they have the same bits; zeros with different signs differ. Types must be
    equal; devices, strides, ``requires_grad`` and the order of dict keys are ignored. For DTensors,
    all ranks compare metadata such as the shape, and the ranks that hold the same shard compare
    that shard. Objects that are not tensors, arrays or numbers are equal if their pickles are
    equal, or if ``==`` returns True.

    Tensors are not sent: ranks exchange checksums (128-bit BLAKE2b). If the checksums of objects
    differ, ranks also exchange pickles of the objects.

    Args:
        tree: the values to compare.
        message: start of the error message; can differ between ranks.
        process_group: the ranks to compare; None means the default group.
        timeout: seconds to wait for ranks that have not arrived. A rank that is still computing
            checksums does not time out.

    Raises:
        RanksDisagree: the trees differ. This subclass of AssertionError has a message that names
            the leaves and ranks that differ.
        TimeoutError: a rank did not arrive; the message names the rank.
        ConnectionError: the connection to the store is lost.
        ValueError: this process is not in the group.

    Example::

        multihost.assert_equal({"seed": seed, "model": model.state_dict()}, "after the restore")
    """
    with CollectiveCall("assert_equal()", process_group, timeout) as call:
        summary = _Summary()
        with call.alive(lambda: summary.bytes_done):
            outcome = call.agree(lambda: summary.digest_tree(tree), _compare_digests)
        if outcome == "same":
            return
        begin = f"{message}: " if message else ""
        call.agree(lambda: summary.details, partial(_compare_details, begin))


@dataclass
class _Details:
    """Descriptions of all leaves, and checksums and pickles of this rank's values.

    Attributes:
        described: description of each leaf, by name; includes the value if it is short.
        checksums: checksums, by part and name; see :func:`_part`.
        pickles: pickles of objects, by name.
    """

    described: dict[str, str] = field(default_factory=dict)
    checksums: dict[str, dict[str, str]] = field(default_factory=dict)
    pickles: dict[str, bytes] = field(default_factory=dict)


class _Summary:
    """Computes the digests and the details of this rank's tree."""

    def __init__(self) -> None:
        self.bytes_done = 0
        self.details = _Details()

    def digest_tree(self, tree: Any) -> dict[str, bytes]:
        """Returns a digest for each part; the digest of part "" must be equal on all ranks."""
        own = Tree(tree)
        details = self.details
        described = []
        for name, leaf in zip(own.names, own.leaves, strict=True):
            description, checksum = self._describe_leaf(name, leaf)
            described.append(description)
            part = _part(leaf)
            if part is not None:
                details.checksums.setdefault(part, {})[name] = checksum
        details.described = own.described(described)
        digests = {part: digest(checksums) for part, checksums in details.checksums.items()}
        common = digest(details.described) + digests.get("", b"")
        return {**digests, "": common}

    def _describe_leaf(self, name: str, leaf: Any) -> tuple[str, str]:
        """Returns the description of a leaf, and the checksum of its value."""
        if isinstance(leaf, DTensor):
            return kind(leaf), self._checksum(as_bytes(leaf.to_local()))
        if is_strided(leaf):
            data = self._checksum(as_bytes(leaf))
            shown = f" {leaf.detach().tolist()}" if not leaf.dim() and leaf.dtype in _SHOWN else ""
            return f"{kind(leaf)}{shown and ',' + shown}", data
        if is_array(leaf):
            return kind(leaf), self._checksum(array_bytes(leaf))
        kind_of = type(leaf)
        type_name = kind_of.__name__
        if kind_of.__module__ != "builtins":
            type_name = f"{kind_of.__module__}.{type_name}"
        if kind_of in (float, complex):
            number = complex(leaf)
            return f"{type_name} {leaf!r}", struct.pack("<dd", number.real, number.imag).hex()
        if kind_of in _PLAIN:
            text = repr(leaf)
            shown = text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."
            return f"{type_name} {shown}", hashlib.blake2b(text.encode()).hexdigest()
        pickled = pickle.dumps(leaf)
        self.details.pickles[name] = pickled
        return type_name, hashlib.blake2b(pickled, digest_size=16).hexdigest()

    def _checksum(self, data: torch.Tensor) -> str:
        found = hashlib.blake2b(digest_size=16)
        for piece in host_pieces(data):
            found.update(piece)
            self.bytes_done += len(piece)
        return found.hexdigest()


def _part(leaf: Any) -> str | None:
    """Returns a name that is the same on all ranks that must have the same bytes.

    The name is "" if all ranks must have the same bytes, and None if each rank may have different
    bytes.
    """
    if not isinstance(leaf, DTensor):
        return ""
    if any(placement.is_partial() for placement in leaf.placements):
        return None
    coordinate = leaf.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    pairs = zip(coordinate, leaf.placements, strict=True)
    shard = [index for index, placement in pairs if not placement.is_replicate()]
    mesh = hashlib.blake2b(repr(leaf.device_mesh.mesh.tolist()).encode(), digest_size=8)
    placements = repr(leaf.placements)
    return f"{shard} {mesh.hexdigest()} {placements}"


def _compare_digests(by_rank: list[dict[str, bytes]]) -> str:
    seen: dict[str, bytes] = {}
    for digests in by_rank:
        for part, value in digests.items():
            if seen.setdefault(part, value) != value:
                return "different"
    return "same"


def _compare_details(begin: str, by_rank: list[_Details]) -> Disagreement | None:
    described = [details.described for details in by_rank]
    lines = differences(described)
    kinds = {name for name in described[0] if len({d.get(name) for d in described}) == 1}
    by_part: dict[str, dict[str, list[int]]] = {}
    for rank, details in enumerate(by_rank):
        for part, checksums in details.checksums.items():
            for name in checksums:
                by_part.setdefault(part, {}).setdefault(name, []).append(rank)
    for part, names in by_part.items():
        for name, ranks in names.items():
            groups = _group_by_value(by_rank, part, name, ranks)
            if name in kinds and len(groups) > 1:
                values = ", ".join(
                    f"{ranks_text(group)} {'has' if len(group) == 1 else 'have'} "
                    f"{'another' if number else 'one value'}"
                    for number, group in enumerate(groups)
                )
                what = described[0][name]
                shard = f", its shard {part.split(']')[0]}]" if part.startswith("[") else ""
                lines.append(f"{name or 'the tree'} ({what}{shard}) differs: {values}")
    if not lines:
        return None
    count = "1 leaf" if len(lines) == 1 else f"{len(lines)} leaves"
    return Disagreement(f"{begin}ranks differ in {count}:", lines)


def _group_by_value(
    by_rank: list[_Details], part: str, name: str, ranks: list[int]
) -> list[list[int]]:
    """Groups the ranks by equal values of a leaf."""
    by_checksum: dict[str, list[int]] = {}
    for rank in ranks:
        by_checksum.setdefault(by_rank[rank].checksums[part][name], []).append(rank)
    groups = list(by_checksum.values())
    if len(groups) == 1 or any(name not in by_rank[rank].pickles for rank in ranks):
        return groups
    merged: list[tuple[Any, list[int]]] = []
    for group in groups:
        value = pickle.loads(by_rank[group[0]].pickles[name])
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
    except Exception:  # e.g. if the objects contain arrays
        return False
