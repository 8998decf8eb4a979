"""Trees of values: their leaves by name, and descriptions of leaves.

The containers of a tree are the types registered with ``torch.utils._pytree``: dicts, lists,
tuples, named tuples, dataclasses and others. All other values are leaves, including ``None``.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.distributed.tensor import DTensor

from torch_ckpt._base.formatting import ranks_text

_LEAVES = (int, float, bool, str, bytes, type(None))


class Tree:
    """A flattened tree.

    Attributes:
        names: names of the leaves, such as "a.b.0"; "" if the tree itself is a leaf.
        leaves: the leaves, in the order of ``names``.
        containers: type of each container, by name. Distinguishes empty containers.
        spec: the pytree specification, to unflatten leaves.
    """

    def __init__(self, tree: Any) -> None:
        self.names: list[str] = []
        self.leaves: list[Any] = []
        self.containers: dict[str, str] = {}
        self.spec = pytree.tree_structure(tree)
        self._add("", tree)

    def with_leaves(self, leaves: Iterable[Any]) -> Any:
        """Returns a tree with the same containers and other leaves."""
        return pytree.tree_unflatten(list(leaves), self.spec)

    def described(self, leaves: Iterable[str]) -> dict[str, str]:
        """Returns the descriptions of all containers and leaves by name.

        Args:
            leaves: descriptions of the leaves.
        """
        containers = {
            f"{name or 'the tree'} (container)": kind for name, kind in self.containers.items()
        }
        return {**containers, **dict(zip(self.names, leaves, strict=True))}

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
    """Returns the children of a container by key; None for a leaf.

    If two keys have the same text, or a key contains a dot, all keys are returned in Python syntax:
    "['a.b']".
    """
    if isinstance(node, torch.Tensor) or type(node) in _LEAVES:
        return None  # ten times faster than pytree
    inside, _spec = pytree.tree_flatten_with_path(node, is_leaf=lambda other: other is not node)
    if len(inside) == 1 and not inside[0][0]:
        return None
    keys = [_plain(path[0]) for path, _child in inside]
    if len(set(keys)) < len(keys) or any("." in key for key in keys):
        keys = [pytree.keystr(path) for path, _child in inside]
    return [(key, child) for key, (_path, child) in zip(keys, inside, strict=True)]


def is_strided(leaf: Any) -> bool:
    """Returns True for a plain strided tensor, and False for sparse, quantized, meta and other
    tensors."""
    return (
        type(leaf) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and leaf.layout == torch.strided
        and leaf.device.type != "meta"
        and not leaf.is_quantized
    )


def is_array(leaf: Any) -> bool:
    """Returns True for a NumPy array that contains no Python objects."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(leaf) is numpy.ndarray and not leaf.dtype.hasobject


def kind(leaf: Any) -> str:
    """Describes the type, dtype and shape of a leaf, without its values."""
    if isinstance(leaf, DTensor):
        placements = ", ".join(str(placement) for placement in leaf.placements)
        return f"a DTensor of {_dtype(leaf)}, shape {tuple(leaf.shape)}, placements [{placements}]"
    if is_strided(leaf):
        return f"a tensor of {_dtype(leaf)}, shape {tuple(leaf.shape)}"
    if is_array(leaf):
        return f"an array of {leaf.dtype}, shape {leaf.shape}"
    return "an object"


def array_bytes(array: Any) -> torch.Tensor:
    """Returns the bytes of an array as a one-dimensional tensor: a view if the array is contiguous
    and writable, otherwise a copy."""
    import numpy

    data = numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
    return torch.from_numpy(data if data.flags.writeable else data.copy())


def digest(described: dict[str, str]) -> bytes:
    """Returns a 16-byte hash of descriptions, to compare them between ranks. Their order does not
    matter."""
    return hashlib.blake2b(repr(sorted(described.items())).encode(), digest_size=16).digest()


def differences(by_rank: Sequence[dict[str, str]]) -> list[str]:
    """Returns one line for each name whose description differs between ranks."""
    names = dict.fromkeys(name for described in by_rank for name in described)
    lines = []
    for name in names:
        ranks: dict[str, list[int]] = {}
        for rank, described in enumerate(by_rank):
            ranks.setdefault(described.get(name, "missing"), []).append(rank)
        if len(ranks) > 1:
            kinds = "; ".join(f"{kind} on {ranks_text(where)}" for kind, where in ranks.items())
            lines.append(f"{name or 'the tree'} is {kinds}")
    return lines


def _plain(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
