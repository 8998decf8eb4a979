"""The state dict of one save on one rank.

1. :class:`SaveState` flattens the state dict (csrc/torch/flat_state.h). A snapshot keeps aliases of
   the tensors and copies of the objects, so that the state dict may change afterwards.
2. :meth:`SaveState.plan` checks the values. torch describes the parts of those that the engine does
   not know, such as ShardedTensors (checkpoint/flat_state.py).
   The result is the structure of the state, on which the plan of a save depends.
3. :meth:`SaveState.sources` looks up the values of the items that this rank writes.
4. :meth:`SaveState.release` releases all values, when they have been copied.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor

from torch_ckpt import _C
from torch_ckpt._base.cuda_events import refuse_capture
from torch_ckpt._base.cycle_collector import no_gc
from torch_ckpt.checkpoint.chunks import hash_layout, local_chunks, require_consecutive
from torch_ckpt.checkpoint.flat_state import describe, flatten_sharded_tensors
from torch_ckpt.checkpoint.objects import pickled, unpicklable, warn_of_what_will_not_load
from torch_ckpt.errors import CheckpointError
from torch_ckpt.saving.items import as_value, require_savable
from torch_ckpt.saving.replica_check import fingerprint_of
from torch_ckpt.saving.snapshots import IMMUTABLE, snapshot_of

StateDict = dict[str, Any]


class SaveState:
    """The values of one rank. The docstring of the module lists the steps.

    Args:
        state_dict: the state dict, without ``Stateful`` values.
        snapshot: keep aliases of tensors and copies of objects.

    Attributes:
        structure: the inputs of a plan, set by :meth:`plan`.
        resolved: number of values that :meth:`sources` has converted for the engine.
        tensor_bytes: size of the tensors, except ShardedTensors. A DTensor counts with the size of
            the complete tensor.

    Raises:
        ValueError: two values have the same name.
        CheckpointError: an object cannot be copied for a snapshot, or a tensor has no size or
            values.
    """

    @no_gc()
    def __init__(self, state_dict: StateDict, *, snapshot: bool = False) -> None:
        refuse_capture()
        #: Watches the tensors of a snapshot; None for other states.
        self.watch = _C.SourceWatch() if snapshot else None
        self._flat = _C.FlatState(state_dict, local_chunks, self.watch)
        self.tensor_bytes = self._flat.tensor_bytes()
        for row in self._flat.described_by_torch():
            value = self._flat.value(row)
            # A ShardedTensor refuses the question.
            if isinstance(value, torch.Tensor) and not isinstance(value, ShardedTensor):
                require_savable(self._flat.name(row), value)
                self.tensor_bytes += value.size().numel() * value.dtype.itemsize
        flatten_sharded_tensors(self._flat)
        if self.watch is not None:
            for row in sorted((*self._flat.objects(), *self._flat.described_by_torch())):
                name, value = self._flat.name(row), self._flat.value(row)
                if isinstance(value, IMMUTABLE):
                    continue
                kept = snapshot_of(value, name, self.watch)
                if kept is not value:
                    self._flat.replace(row, kept)
        #: torch's items of the values that torch describes, by row.
        self._described: dict[int, list[WriteItem]] = {}
        self.structure = (b"", b"")
        self.resolved = 0

    # --- the values ------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Returns the fully qualified names of all values."""
        return self._flat.names()

    def values(self) -> Iterator[Any]:
        """Yields all values."""
        for row in range(len(self._flat.names())):
            yield self._flat.value(row)

    def aliases(self, names: Collection[str], others: Collection[str]) -> list[str]:
        """Returns the tensors among ``names`` that have the same dtype, size and memory as one of
        ``others``."""
        memories: dict[str, Any] = {}
        for row, name in enumerate(self._flat.names()):
            value = self._flat.value(row)
            local = getattr(value, "_local_tensor", value)
            if isinstance(local, torch.Tensor):
                memories[name] = local.data_ptr(), local.shape, local.stride(), local.dtype
        found = {memories[name] for name in others if name in memories}
        return [name for name in names if memories.get(name) in found]

    def remove(self, names: Collection[str]) -> None:
        """Removes values, which are then not saved."""
        for row, name in enumerate(self._flat.names()):
            if name in names:
                self._flat.remove(row)

    # --- the plan --------------------------------------------------------------------------------

    @no_gc()
    def plan(self) -> None:
        """Checks the values and prepares :meth:`contents`.

        Raises:
            CheckpointError: a tensor has no values, or this rank's part of a DTensor is not a
                single block.
        """
        for row in self._flat.described_by_torch():
            name, value = self._flat.name(row), self._flat.value(row)
            _require_values(name, value)
            require_consecutive(name, value)
            self._described[row] = describe(self._flat, row)
        for row in self._flat.on_meta():
            _require_values(self._flat.name(row), self._flat.value(row))
        self.structure = self._flat.contents(hash_layout)

    def fingerprints(self, mode: str) -> bytes:
        """Returns 4 bytes for each plain tensor, then for each object. These values are assumed to
        be identical on all ranks.

        Args:
            mode: "error" reads all bytes of every tensor. "warn" reads at most 64 KiB of a tensor,
                which is enough to detect that each rank has its own value.
        """
        objects = [fingerprint_of(self._flat.value(row)) for row in self._flat.objects()]
        return self._flat.fingerprints(mode == "error") + array("I", objects).tobytes()

    def checksums(self, copies: bytes) -> bytes:
        """Returns 4 bytes for each of the copies of sharded tensors that the plan lists. Call this
        before :meth:`sources`."""
        numbers = array("I", copies)
        found = array("I", self._flat.checksums(copies))
        # The engine cannot read tensors that are not plain.
        positions = {number: position for position, number in enumerate(numbers)}
        for item, row, value, part in self._flat.items_to_convert(copies):
            if row in self._described or not _C.is_plain(value):
                found[positions[item]] = _checksum_of(self._tensor(row, value, part))
        return found.tobytes()

    # --- the write -------------------------------------------------------------------------------

    @no_gc()
    def sources(self, items: bytes, with_names: bool = False) -> _C.SaveSources:
        """Returns the values of the items that this rank writes.

        Args:
            items: the numbers of the items, as the plan has them.
            with_names: also return the names.

        Raises:
            CheckpointError: a value cannot be pickled, or a tensor cannot be saved.
        """
        for item, row, value, part in self._flat.items_to_convert(items):
            if row in self._described or isinstance(value, torch.Tensor):
                found = self._tensor(row, value, part)
            else:
                found = self._pickle(self._flat.name(row), value)
            self._flat.set_item(item, found)
        return self._flat.sources(items, with_names)

    @no_gc()
    def parts(self, items: bytes, places: bytes, dtype: torch.dtype | None) -> _C.SaveSources:
        """Returns the parts of tensors that this rank writes, for files that several ranks write.

        Args:
            items: the numbers of the items, as the plan has them.
            places: the places of the tensors, encoded by the coordinator.
            dtype: dtype in which floating-point tensors are stored; None keeps each tensor's.

        Raises:
            CheckpointError: the files cannot hold a tensor.
        """
        # The engine itself makes tensors on devices contiguous.
        for _item, row, value, _part in self._flat.items_to_convert(items):
            if not _C.is_plain(value):
                raise CheckpointError(
                    f"{self._flat.name(row)}: safetensors files cannot hold a tensor of this "
                    "layout, subclass or device; convert it to a plain tensor first, or leave it "
                    "out"
                )
        return self._flat.parts(items, places, dtype)

    # --- the sources of a snapshot ---------------------------------------------------------------

    def release(self) -> None:
        """Releases all values, except the tensors that the watch still watches."""
        self._flat = _C.FlatState({}, local_chunks)

    # --- private ---------------------------------------------------------------------------------

    def _pickle(self, name: str, value: Any) -> Any:
        try:
            found = pickled(value)
        except Exception as error:
            raise unpicklable(name, value, error) from None
        # state/splitting.py wraps states in this type, and has checked them by the caller's names.
        if type(value) is not SimpleNamespace:
            warn_of_what_will_not_load(name, value, found)
        self.resolved += 1
        return found

    def _tensor(self, row: int, value: Any, part: int) -> Any:
        """Returns what the engine writes for a tensor, or for a part of a described tensor."""
        name = self._flat.name(row)
        if row not in self._described:
            return as_value(name, value)
        index = self._described[row][part].index
        found = as_value(name, find_state_dict_object({name: value}, index))
        self.resolved += 1
        if type(value) is not DTensor and not isinstance(found, torch.Tensor):
            warn_of_what_will_not_load(name, value, found)
        return found


def _checksum_of(value: Any) -> int:
    """Returns a CRC-32 of a value as the engine writes it: a plain tensor, or bytes."""
    return _C.fingerprint(value) if isinstance(value, torch.Tensor) else zlib.crc32(value)


def _require_values(name: str, value: Any) -> None:
    # is_meta raises for a ShardedTensor with several shards.
    local = getattr(value, "_local_tensor", value)
    if isinstance(value, torch.Tensor) and local.device.type == "meta":
        raise CheckpointError(
            f"{name}: a tensor on the meta device has no values to save; give it memory and values "
            "first (module.to_empty(device=...), then initialize or load it), or leave it out"
        )
