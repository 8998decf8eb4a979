"""Encodes the objects of a checkpoint, and decodes them without running their code.

An object is stored as ``torch.save`` writes it: an archive of a pickle and the data of tensors. A
pickle is a program, and DCP's planner executes it. Here, the interpreter in checkpoint/unpickler.py
executes it instead. It has a list of names, of the arguments with which each may be called, and of
the operations that are allowed on the results.

``torch.load(weights_only=True)`` is not used, for these reasons:

- Its list can be extended only for the whole process, including loads in other threads, and leaving
  ``safe_globals`` removes the user's own additions.
- It supports neither deque nor defaultdict, and does not limit what a constructor allocates.
- Before torch 2.15 it does not validate sparse tensors.
"""

from __future__ import annotations

import io
import pickle
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch

from torch_ckpt._base.formatting import printable
from torch_ckpt._base.log import warn
from torch_ckpt.checkpoint.safe_types import NotInstalled
from torch_ckpt.checkpoint.unpickler import Archive, NoSuchDevice, Unpickler
from torch_ckpt.errors import CheckpointError, Corrupt, Unsafe

#: Types of objects that can always be loaded.
PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})

_CONTAINERS = (list, tuple, set, frozenset, deque)

# (name, types in the object) of each object that has been checked.
_checked: set[tuple[str, frozenset[type]]] = set()
# The sets of types with which an object can be loaded without allow_pickle.
_known_to_load: set[frozenset[type]] = set()

# Maximum length of an error text, in characters.
_LONGEST_REASON = 400


def decode(data: bytes | memoryview, name: str, file: str) -> Any:
    """Decodes an object from the bytes that ``torch.save`` wrote.

    Tensors are restored on the devices from which they were saved, as by ``torch.load``.

    Args:
        data: the record of the object.
        name: fully qualified name of the object, for messages.
        file: the file with the record, for messages.

    Raises:
        Unsafe: the pickle names a type or function that is neither allow-listed nor declared safe
            by the user.
        Corrupt: ``torch.save`` did not write the record.
        CheckpointError: a tensor in the object was saved from a device that this process does not
            have, or the object contains NumPy values and numpy is not installed.
    """
    try:
        archive = Archive(data)
        return Unpickler(archive).load()
    except Unsafe as error:
        raise Unsafe(
            f"{name}: the object in {file} {_short_text(error)}; pass "
            "ReadOptions(allow_pickle=True) (to a FileSystemReader: allow_pickle=True) only if you "
            "trust the writer, or declare your own types safe: "
            "torch.serialization.add_safe_globals([...])"
        ) from None
    except NotInstalled as error:
        raise CheckpointError(
            f"{name}: the object in {file} contains NumPy values, but numpy is not installed; "
            "install it: pip install numpy"
        ) from error
    except NoSuchDevice as error:
        raise CheckpointError(
            f"{name}: the object in {file} contains a tensor on {error}; load it on a machine that "
            "has this device. If you trust the writer, you can also load it by dcp.load with "
            "FileSystemReader(allow_pickle=True) and a planner whose load_bytes calls "
            "torch.load(map_location=...)"
        ) from None
    except Exception as error:
        raise Corrupt(
            f"{name}: the object in {file} was not written by torch.save: {_short_text(error)}; "
            "if a planner of your own decodes it, use FileSystemReader(allow_pickle=True)"
        ) from error


def unpicklable(name: str, value: Any, error: Exception) -> CheckpointError:
    """Builds the error for an object that cannot be saved.

    Args:
        name: fully qualified name of the object.
        error: the error from pickling or copying the object.
    """
    name, value = _culprit(name, value, pickled)
    return CheckpointError(
        f"{name}: an object of type {type(value).__qualname__} cannot be saved "
        f"({type(error).__name__}: {error}); remove it from the state, or save the tensors, "
        "numbers and strings in it instead"
    )


def warn_of_what_will_not_load(
    name: str, value: Any, data: bytes | memoryview | None = None
) -> None:
    """Warns if a load will refuse an object of a state dict. Checks each combination of a name and
    the types in the object only once.

    Args:
        name: fully qualified name of the object.
        data: the record of the object, if the caller has it.

    Raises:
        CheckpointError: the object cannot be pickled.
    """
    if type(value) in PLAIN:
        return
    types: set[type] = set()
    _add_types(value, types, set())
    key = name, frozenset(types)
    if key in _checked or key[1] in _known_to_load:
        return
    try:
        data = pickled(value) if data is None else data
    except Exception as error:
        raise unpicklable(name, value, error) from None
    _checked.add(key)
    try:
        _require_loadable(name, value, data)
    except CheckpointError:
        name, value = _culprit(name, value, lambda part: _require_loadable("", part, pickled(part)))
        try:
            _require_loadable(name, value, pickled(value))
        except CheckpointError as error:
            warn(f"an object was saved that a load will refuse: {error}")
    else:
        _known_to_load.add(key[1])


def pickled(value: Any) -> memoryview:
    """Returns the bytes that torch.save writes for a value, without the memory that its tensors do
    not use."""
    return save_compactly(value).getbuffer()


def _require_loadable(name: str, value: Any, data: bytes | memoryview) -> None:
    if isinstance(value, torch.Tensor):
        _require_loadable_tensor(name, data)
    else:
        decode(data, name, "its checkpoint")


def _culprit(name: str, value: Any, work: Callable[[Any], object]) -> tuple[str, Any]:
    """Returns the name and value of the innermost part for which ``work`` fails. ``work`` must fail
    for the complete value."""
    seen: set[int] = set()
    while id(value) not in seen:
        seen.add(id(value))
        for inner, part in _parts(name, value):
            try:
                work(part)
            except Exception:
                name, value = inner, part
                break
    return name, value


def _parts(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f"{name}.{key}", part) for key, part in value.items()]
    if isinstance(value, _CONTAINERS):
        return [(f"{name}.{index}", part) for index, part in enumerate(value)]
    own = getattr(value, "__dict__", None)
    if not isinstance(own, dict) or isinstance(value, type | ModuleType | FunctionType):
        return []
    # The namespace in which state/splitting.py wraps a state is not part of the names.
    is_wrapper = type(value) is SimpleNamespace
    return [
        (name if is_wrapper else f"{name}.{key}", part)
        for key, part in own.items()
        if not key.startswith("__")  # Python's own attributes, such as those of enum members
    ]


def _require_loadable_tensor(name: str, data: bytes | memoryview) -> None:
    stream = io.BytesIO(data)
    unsafe = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(stream))
    if unsafe:
        raise Unsafe(
            f"{name}: this tensor subclass is saved with the names {unsafe}, which are not "
            "allow-listed; save a plain tensor, or declare them safe in the program that loads it "
            "(torch.serialization.add_safe_globals([...]))"
        )


def _add_types(value: Any, types: set[type], seen: set[int]) -> None:
    """Adds the types of a value and of all its parts that Python exposes."""
    types.add(type(value))
    if id(value) in seen:
        return
    seen.add(id(value))
    parts: list[Any] = []
    if isinstance(value, dict):
        parts += [*value.keys(), *value.values()]
    elif isinstance(value, _CONTAINERS):
        parts += value
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict):
        parts += own.values()
    kinds = set(map(type, parts))
    types |= kinds
    if not kinds.issubset(PLAIN):
        for part in parts:
            if type(part) not in PLAIN:
                _add_types(part, types, seen)


def _short_text(error: Exception) -> str:
    """Returns the text of an error, shortened because it may quote the pickle and is sent to every
    rank."""
    text = str(error) or type(error).__name__
    return printable(text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}...")


# --- writing --------------------------------------------------------------------------------------

# ``torch.save`` writes the complete storage of each tensor in an object, so a slice of a large
# tensor would write the large tensor. Tensors of an object whose memory overlaps share one storage
# before and after a save. So:
#
# 1. The first pickler stops at the first tensor that is smaller than its storage. Most objects have
#    none.
# 2. The second pickler only collects the tensors by storage. Tensors that overlap form a part.
# 3. The last pickler writes copies of these parts in place of the storage. A tensor that has no
#    elements in common with others is made contiguous, so that a column of a matrix takes no more
#    bytes than its elements.


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
