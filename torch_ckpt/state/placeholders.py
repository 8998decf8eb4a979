"""Placeholders in a state dict for values whose names are unknown until the metadata is read."""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from torch_ckpt import _C, _core
from torch_ckpt.checkpoint.dtypes import loses_precision
from torch_ckpt.state.splitting import OBJECTS

StateDict = dict[str, Any]

#: Attribute of a meta tensor: the device on which to allocate it.
DEVICE = "_torch_ckpt_device"


@dataclass
class Stored:
    """Names and types of the values in a checkpoint, for callers that choose what to load.

    Attributes:
        index: the index of the checkpoint.
        metadata: decodes the metadata into torch's objects.
        read: reads objects of the checkpoint, and returns their values by name.
        old_names: the names that ``rename`` has replaced, by their new names.
        size_rule: allowed target sizes relative to the stored sizes.
        loads_all: True if the caller passed no ``names``.
    """

    index: _core.CheckpointIndex
    metadata: Callable[[], Metadata]
    read: Callable[[Iterable[str]], StateDict]
    old_names: Mapping[str, str]
    size_rule: _C.SizeRule
    loads_all: bool

    @cached_property
    def names(self) -> list[str]:
        """Fully qualified names, in the order of the metadata."""
        return self.index.names()

    @cached_property
    def object_keys(self) -> list[str]:
        """The keys of the values whose state torch_ckpt has split (splitting.py)."""
        end = f".{OBJECTS}"
        return [name.removesuffix(end) for name in self.names if name.endswith(end)]

    @cached_property
    def _sorted(self) -> list[tuple[str, int]]:
        """The names, sorted, with their places in the metadata."""
        return sorted((name, place) for place, name in enumerate(self.names))

    def beneath(self, prefix: str) -> list[str]:
        """Returns the names that begin with a prefix, in the order of the metadata."""
        begin = bisect.bisect_left(self._sorted, (prefix, 0))
        found = itertools.takewhile(
            lambda item: item[0].startswith(prefix), itertools.islice(self._sorted, begin, None)
        )
        return [name for name, _place in sorted(found, key=operator.itemgetter(1))]

    def __contains__(self, name: str) -> bool:
        return name in self.index

    def is_tensor(self, name: str) -> bool:
        """Returns True if the checkpoint has a tensor with this name."""
        return self.index.tensor(name) is not None

    def is_sharded(self, name: str) -> bool:
        """Returns True if the checkpoint has a tensor with this name in several shards."""
        return len(self.index.shards(name)) > 1

    def fits(self, name: str, tensor: torch.Tensor) -> bool:
        """Returns True if a stored tensor can be loaded into a tensor without losing precision or
        becoming another kind of number."""
        dtype, shape = self._tensor(name)
        is_same_kind = dtype == tensor.dtype or (
            torch.bool not in (dtype, tensor.dtype)
            and dtype.is_floating_point == tensor.dtype.is_floating_point
            and dtype.is_complex == tensor.dtype.is_complex
            and not loses_precision(dtype, tensor.dtype)
        )
        is_permitted = shape == tensor.shape
        if len(shape) == tensor.dim() and self.size_rule != _C.SizeRule.SAME:
            is_growing = all(map(operator.le, shape, tensor.shape))
            is_permitted = is_growing or self.size_rule == _C.SizeRule.ANY
        return is_same_kind and is_permitted

    def meta_tensor(self, name: str, device: torch.device | None = None) -> torch.Tensor:
        """Returns a meta tensor with the shape and dtype of the stored tensor.

        Args:
            device: the device on which the load allocates the tensor; None for the device of the
                process group.
        """
        dtype, shape = self._tensor(name)
        meta = torch.empty(shape, dtype=dtype, device="meta")
        if device is not None:
            setattr(meta, DEVICE, device)
        return meta

    def _tensor(self, name: str) -> tuple[torch.dtype, torch.Size]:
        found = self.index.tensor(name)
        assert found is not None
        return getattr(torch, found[0]), torch.Size(found[1])

    def old_name(self, name: str) -> str:
        """Returns the name that ``rename`` has replaced."""
        return self.old_names.get(name, name)

    def paths(self) -> Mapping[str, Any]:
        """Returns each value's path in the nested state dict, by name. Empty if the planner that
        saved the checkpoint stored no paths."""
        paths = self.metadata().planner_data
        return paths if isinstance(paths, dict) else {}


def describe_sharded(name: str) -> str:
    """Describes why a sharded tensor is not loaded into a new tensor."""
    return (
        f"{name} was saved as a sharded tensor, but the state has no tensor of this name to load "
        "into. Create the tensor before the restore, for example by running one step"
    )


class Placeholder:
    """A placeholder in a state dict for values whose names are unknown until the metadata is read.

    Attributes:
        values: the loaded values, by fully qualified name.
        wanted: description of the values that it loads, for reports.
    """

    wanted = "an object"

    def __init__(self) -> None:
        self.values: StateDict = {}

    def choose(self, stored: Stored, name: str) -> StateDict:
        """Chooses the values to load in place of this placeholder.

        Args:
            name: the fully qualified name of the placeholder.

        Returns:
            A meta tensor for each tensor, and any other value for each object, by fully qualified
            name. Names that the checkpoint lacks are reported as missing.
        """
        raise NotImplementedError

    def refusals(self, stored: Stored, is_chosen: Callable[[str], bool]) -> list[str]:
        """Returns the reasons why the chosen values cannot be restored. A load with any reason
        fails before it changes a value, even with ``strict=False``.

        Args:
            is_chosen: returns True for the names to load.
        """
        return []

    def matched(self, loaded: Set[str]) -> None:
        """Receives the names of the values that are loaded."""

    def __setitem__(self, name: str, value: Any) -> None:
        # torch's set_element calls this.
        self.values[name] = value


class OptionalObject(Placeholder):
    """A placeholder for an object of its own name, which the checkpoint need not have.

    Attributes:
        missing: True after a load from a checkpoint that lacks the object.
    """

    def __init__(self) -> None:
        super().__init__()
        self.missing = False

    def choose(self, stored: Stored, name: str) -> StateDict:
        self.missing = name not in stored
        return {} if self.missing else {name: self}
