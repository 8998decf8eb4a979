"""Trees as all functions here see them: leaves by name, and what a leaf is, in words.

A tree is what ``torch.utils._pytree`` takes apart: dicts, lists, tuples, named tuples, dataclasses
and other classes that are registered there. All else is a leaf, ``None`` too.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.distributed.tensor import DTensor

from torch_ckpt._base.formatting import ranks_text

#: Differences that an error names; the others are counted.
SHOWN = 10

# How much of a device's tensor is copied at once.
_PIECE_BYTES = 64 << 20

_LEAVES = (int, float, bool, str, bytes, type(None))

#: Integers of the same size: not every dtype can be copied or reshaped as itself.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Tree:
    """A tree taken apart.

    Attributes:
        names: of the leaves, as "a.b.0"; "" where the tree is a leaf itself.
        leaves: in the same order.
        containers: type of each container by its name; they tell empty ones apart.
        spec: puts leaves together again.
    """

    def __init__(self, tree: Any) -> None:
        self.names: list[str] = []
        self.leaves: list[Any] = []
        self.containers: dict[str, str] = {}
        self.spec = pytree.tree_structure(tree)
        self._add("", tree)

    def with_leaves(self, leaves: Iterable[Any]) -> Any:
        """The same containers with other leaves."""
        return pytree.tree_unflatten(list(leaves), self.spec)

    def described(self, leaves: Iterable[str]) -> dict[str, str]:
        """What all containers and leaves are, by name; what the leaves are is given."""
        whole = {f"{name or 'the tree'} (container)": of for name, of in self.containers.items()}
        return {**whole, **dict(zip(self.names, leaves, strict=True))}

    def _add(self, name: str, node: Any) -> None:
        inside = children(node)
        if inside is None:
            self.names.append(name)
            self.leaves.append(node)
            return
        self.containers[name] = type(node).__name__
        for key, child in inside:
            self._add(f"{name}.{key}" if name else key, child)


def children(node: Any) -> list[tuple[str, Any]] | None:
    """What a container holds, by key; None for a leaf.

    Where two keys would look the same, or have a dot, all are as Python writes them: "['a.b']".
    """
    if isinstance(node, torch.Tensor) or type(node) in _LEAVES:
        return None  # at a tenth of the time
    inside, _spec = pytree.tree_flatten_with_path(node, is_leaf=lambda other: other is not node)
    if len(inside) == 1 and not inside[0][0]:
        return None
    keys = [_plain(path[0]) for path, _child in inside]
    if len(set(keys)) < len(keys) or any("." in key for key in keys):
        keys = [pytree.keystr(path) for path, _child in inside]
    return [(key, child) for key, (_path, child) in zip(keys, inside, strict=True)]


def is_strided(leaf: Any) -> bool:
    """Whether a leaf is a tensor that is its bytes; sparse, quantized, meta and others are not."""
    return (
        type(leaf) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and leaf.layout == torch.strided
        and leaf.device.type != "meta"
        and not leaf.is_quantized
    )


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array of numpy's that is its bytes."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(leaf) is numpy.ndarray and not leaf.dtype.hasobject


def kind(leaf: Any) -> str:
    """What a leaf is, without its values."""
    if isinstance(leaf, DTensor):
        placements = ", ".join(str(placement) for placement in leaf.placements)
        return f"a DTensor of {_dtype(leaf)}, shape {tuple(leaf.shape)}, placements [{placements}]"
    if is_strided(leaf):
        return f"a tensor of {_dtype(leaf)}, shape {tuple(leaf.shape)}"
    if is_array(leaf):
        return f"an array of {leaf.dtype}, shape {leaf.shape}"
    return "an object"


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes in one dimension: its memory if it is contiguous, else a copy's."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.itemsize in BITS:
        tensor = tensor.view(BITS[tensor.itemsize])
    # Not view or reshape: they keep the last stride of a single element, which may be any number.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def host_pieces(data: torch.Tensor) -> Iterator[ctypes.Array[ctypes.c_char]]:
    """A tensor of bytes piece by piece, for checksums; each is valid until the next."""
    for begin in range(0, data.numel(), _PIECE_BYTES):
        host = data[begin : begin + _PIECE_BYTES].cpu()
        yield (ctypes.c_char * host.numel()).from_address(host.data_ptr())


def empty(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """A contiguous tensor whose bytes are to be set."""
    count = torch.Size(shape).numel()
    data = torch.empty(count * dtype.itemsize, dtype=torch.uint8, device=device)
    return data.view(dtype).view(tuple(shape))


def array_bytes(array: Any) -> torch.Tensor:
    """An array's bytes, in one dimension: its memory where it is contiguous and may be written."""
    import numpy

    data = numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
    return torch.from_numpy(data if data.flags.writeable else data.copy())


def digest(described: dict[str, str]) -> bytes:
    """16 bytes that tell whether two ranks have described the same, in whatever order."""
    return hashlib.blake2b(repr(sorted(described.items())).encode(), digest_size=16).digest()


def differences(by_rank: Sequence[dict[str, str]]) -> list[str]:
    """One line for each name that is not the same on all ranks."""
    names = dict.fromkeys(name for described in by_rank for name in described)
    lines = []
    for name in names:
        ranks: dict[str, list[int]] = {}
        for rank, described in enumerate(by_rank):
            ranks.setdefault(described.get(name, "missing"), []).append(rank)
        if len(ranks) > 1:
            said = "; ".join(f"{what} on {ranks_text(who)}" for what, who in ranks.items())
            lines.append(f"{name or 'the tree'} is {said}")
    return lines


def listed(lines: Sequence[str]) -> str:
    """The first few lines, each on one of its own, and how many more there are."""
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "\n".join(f"  {line}" for line in [*lines[:SHOWN], *more])


def _plain(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
