"""Writes objects as ``torch.save`` does, without the memory that their tensors do not use.

``torch.save`` writes the complete storage of each tensor in an object, so a slice of a large
tensor would write the large tensor. Tensors of an object whose memory overlaps share one storage
before and after a save. So:

1. The first pickler stops at the first tensor that is smaller than its storage. Most objects have
   none.
2. The second pickler only collects the tensors by storage. Tensors that overlap form a part.
3. The last pickler writes copies of these parts in place of the storage. A tensor that has no
   elements in common with others is made contiguous, so that a column of a matrix takes no more
   bytes than its elements.
"""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch

# The functions to which a plain tensor is reduced. Their first arguments are storage and offset.
_REBUILDS = (torch._utils._rebuild_tensor_v2, torch._utils._rebuild_tensor_v3)


def save_compactly(value: Any) -> io.BytesIO:
    """Returns what ``torch.save`` writes for a value, with only the used parts of storages."""
    stream = io.BytesIO()
    try:
        _save(value, stream, _Finder)
    except _SliceFound:
        pass
    else:
        return stream
    found = _Uses()

    class Collector(_TensorPickler):
        def of_tensor(self, reduced: Any, use: _Use) -> Any:
            found.add(use)
            return reduced

        def persistent_id(self, obj: Any) -> Any:
            if isinstance(obj, torch.storage.TypedStorage | torch.UntypedStorage):
                found.count(_untyped(obj))
                return 0
            return None

    Collector(_Nowhere(), protocol=torch.serialization.DEFAULT_PROTOCOL).dump(value)
    parts = found.parts()

    class Replacer(_TensorPickler):
        def of_tensor(self, reduced: Any, use: _Use) -> Any:
            return parts.replaced(reduced, use)

    stream = io.BytesIO()
    _save(value, stream, Replacer)
    return stream


class _SliceFound(Exception):
    """A tensor is smaller than its storage."""


class _Use:
    """The bytes of a storage that a tensor uses.

    Attributes:
        begin, end: range of bytes; both 0 if the tensor has no elements.
        bytes: size of the elements.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.storage = tensor.untyped_storage()
        self.item_bytes = tensor.element_size()
        self.bytes = tensor.numel() * self.item_bytes
        self.begin = self.end = 0
        if tensor.numel():
            first = int(tensor.storage_offset())
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            last = int(first + sum((size - 1) * stride for size, stride in steps))
            self.begin, self.end = first * self.item_bytes, (last + 1) * self.item_bytes


class _TensorPickler(pickle.Pickler):
    """Calls ``of_tensor`` for each plain tensor."""

    def of_tensor(self, reduced: Any, use: _Use) -> Any:
        raise NotImplementedError

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or obj.layout != torch.strided:
            return NotImplemented
        reduced = _reduce(obj)
        return self.of_tensor(reduced, _Use(obj)) if reduced[0] in _REBUILDS else reduced


class _Finder(_TensorPickler):
    def of_tensor(self, reduced: Any, use: _Use) -> Any:
        if use.end - use.begin < use.storage.nbytes():
            raise _SliceFound
        return reduced


class _Nowhere:
    """A file object that drops what is written to it."""

    def write(self, data: bytes) -> None:
        pass


class _Uses:
    """The uses of each storage in an object."""

    def __init__(self) -> None:
        self._uses: dict[int, list[_Use]] = defaultdict(list)
        self._counts: dict[int, int] = defaultdict(int)

    def add(self, use: _Use) -> None:
        self._uses[use.storage._cdata].append(use)

    def count(self, storage: torch.UntypedStorage) -> None:
        """Counts the references to a storage, by tensors and others."""
        self._counts[storage._cdata] += 1

    def parts(self) -> _Parts:
        """Copies the used parts of storages, if that saves memory and only plain tensors refer to
        the storage."""
        parts = _Parts()
        for key, uses in self._uses.items():
            ranges: list[_Range] = []
            for use in sorted(uses, key=lambda one: (one.begin, one.end)):
                if not ranges or not ranges[-1].add(use):
                    ranges.append(_Range(use))
            for one in ranges:
                one.choose_copies()
            used = sum(one.bytes for one in ranges)
            if self._counts[key] == len(uses) and used < uses[0].storage.nbytes():
                parts.add(uses[0].storage, ranges)
        return parts


class _Range:
    """A range of bytes, with the tensors that begin in it.

    Attributes:
        is_gathered: the tensors have no common elements, and are copied separately.
        bytes: size of the copies.
    """

    def __init__(self, use: _Use) -> None:
        self.begin, self.end = use.begin, use.end
        self.is_gathered, self.bytes = False, self.end - self.begin
        self._uses = [use]

    def add(self, use: _Use) -> bool:
        """Adds a tensor, in the order of their begins. Returns False if it does not overlap."""
        if use.begin >= self.end and (use.begin, use.end) != (self.begin, self.end):
            return False
        self.end = max(self.end, use.end)
        self.bytes = self.end - self.begin
        self._uses.append(use)
        return True

    def choose_copies(self) -> None:
        """Sets :attr:`is_gathered` if separate copies of the tensors are smaller than the range.
        Otherwise, begins the range at a multiple of each tensor's item size, because the offset of
        a tensor in its storage is a number of items."""
        elements = sum(use.bytes for use in self._uses)
        item_bytes = {use.item_bytes for use in self._uses}
        self.begin -= self.begin % max(item_bytes)
        self.bytes = self.end - self.begin
        if elements >= self.bytes or len(item_bytes) > 1:
            return
        if len(self._uses) > 1:
            (size,) = item_bytes
            is_used = torch.zeros(self.bytes // size, dtype=torch.bool, device="cpu")
            for use in self._uses:
                offset = (use.begin - self.begin) // size
                is_used.as_strided(use.tensor.shape, use.tensor.stride(), offset).fill_(True)
            if int(is_used.sum()) * size < elements:
                return
        self.is_gathered, self.bytes = True, elements


class _Parts:
    """Copies of the used parts of storages."""

    def __init__(self) -> None:
        self._parts: dict[int, list[tuple[_Range, torch.UntypedStorage | None]]] = {}
        self._held: list[torch.UntypedStorage] = []  # no other storage may get the same address

    def add(self, storage: torch.UntypedStorage, ranges: list[_Range]) -> None:
        elements = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(
            storage, 0, (storage.nbytes(),), (1,)
        )
        self._held.append(storage)
        self._parts[storage._cdata] = [
            (
                one,
                None
                if one.is_gathered
                else elements[one.begin : one.end].clone().untyped_storage(),
            )
            for one in ranges
        ]

    def replaced(self, reduced: Any, use: _Use) -> Any:
        """Returns the reduced tensor with a part in place of its storage."""
        for one, part in self._parts.get(use.storage._cdata, ()):
            if not (one.begin <= use.begin and use.end <= one.end):
                continue
            if part is None:
                gathered = use.tensor.detach().clone(memory_format=torch.contiguous_format)
                gathered = gathered.resolve_conj().resolve_neg()
                gathered.requires_grad_(use.tensor.requires_grad)
                return _reduce(gathered)
            function, (storage, _offset, *others), *more = reduced
            used: Any = part
            if isinstance(storage, torch.storage.TypedStorage):
                used = torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
                    wrap_storage=part, dtype=storage.dtype, _internal=True
                )
            return function, (used, (use.begin - one.begin) // use.item_bytes, *others), *more
        return reduced


def _save(value: Any, stream: io.BytesIO, pickler: type[pickle.Pickler]) -> None:
    torch.save(value, stream, pickle_module=SimpleNamespace(__name__="pickle", Pickler=pickler))


def _reduce(tensor: torch.Tensor) -> Any:
    protocol = torch.serialization.DEFAULT_PROTOCOL
    return tensor.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _untyped(storage: torch.storage.TypedStorage | torch.UntypedStorage) -> torch.UntypedStorage:
    return storage._untyped_storage if isinstance(storage, torch.storage.TypedStorage) else storage
