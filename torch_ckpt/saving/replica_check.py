"""Finds values that should be identical on several ranks but differ.

If several ranks have a plain tensor (not a DTensor), a number or another object with the same name,
only one of the ranks writes it. If the values differ, because replicas have diverged or because
each rank has its own value, the values of the other ranks are lost. So every rank sends
fingerprints with its plan (csrc/torch/fingerprint.h), and the coordinator compares them
(csrc/planning/replicas.h).
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from torch_ckpt import _C
from torch_ckpt._base.formatting import plural, ranks_text
from torch_ckpt.checkpoint.objects import PLAIN

#: Values of the option check_replicas.
MODES = ("off", "warn", "error")

# The parts of a value's state that are not tensors have a name with this suffix
# (state/splitting.py).
_OBJECTS = "._objects"


def description_of(differing: list[tuple[str, list[list[int]]]]) -> str:
    """Returns the text of an error or a warning about values that differ between ranks.

    Args:
        differing: the name of each value, and the groups of ranks that have the same version of it;
            see ``SaveCoordinator.differing_replicas``.
    """
    lines = [
        f"{name.removesuffix(_OBJECTS)}: {versions_text(groups)}" for name, groups in differing
    ]
    loss = ", but only one rank's values are saved"
    return (
        f"{differ_text('value', lines, loss)}. If each rank has its own value, wrap it in "
        "torch_ckpt.PerRank(...) or save it under a different name on each rank. If the values are "
        "replicas, find out why they diverged. Pass check_replicas='off' to skip this comparison"
    )


def differ_text(noun: str, lines: Sequence[str], loss: str) -> str:
    """Describes values that differ between ranks.

    Args:
        noun: noun for a value.
        lines: description of each value. The first ten are listed.
        loss: description of the loss, which follows the count.
    """
    verb = "differs" if len(lines) == 1 else "differ"
    more = f"; and {len(lines) - 10} more" if len(lines) > 10 else ""
    return f"{plural(len(lines), noun)} {verb} between ranks{loss}: {'; '.join(lines[:10])}{more}"


def versions_text(groups: Sequence[Sequence[int]]) -> str:
    """Describes which ranks have which version of a value, given the ranks of each version."""
    verb = "has" if len(groups[0]) == 1 else "have"
    others = "".join(f", {ranks_text(ranks)} another" for ranks in groups[1:])
    return f"{ranks_text(groups[0])} {verb} one value{others}"


def fingerprint_of(value: Any) -> int:
    """Returns a CRC-32 of an object. Returns 0 if the object is not compared: it contains itself or
    cannot be pickled."""
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
            return type(value).__name__, sorted(map(fingerprint_of, value))
        if isinstance(value, torch.Tensor):
            crc = _C.fingerprint(value) if _C.is_plain(value) else 0
            return str(value.dtype), tuple(value.shape), crc
        return None


#: Name, the groups of ranks that have the same version, and the ranks of each mesh, if known.
DifferingCopy = tuple[str, list[list[int]], list[list[int]]]


def text_of_copies(differing: Sequence[DifferingCopy]) -> str:
    """Returns the text of the error about copies that differ."""
    lines = []
    for name, groups, meshes in differing:
        lines.append(f"{name}: {versions_text(groups[:5])}")
        if meshes:
            shown = [f"({ranks_text(ranks)})" for ranks in meshes[:5]]
            shown += [f"{len(meshes) - 5} more"] if len(meshes) > 5 else []
            lines[-1] += f", on the meshes {', '.join(shown)}"
    loss = " that have the same shards, but only one rank's values would be saved"
    return (
        f"{differ_text('sharded tensor', lines, loss)}. If each group of ranks has a tensor of its "
        "own (experts, for example), use a different name in each group, or a DTensor on one mesh "
        "of all groups. If the tensors are copies, find out why they diverged."
    )
