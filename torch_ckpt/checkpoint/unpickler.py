"""An interpreter for pickles that constructs only allow-listed types.

1. The archive must store its entries uncompressed, and must not be a TorchScript program.
2. Names are looked up only in the allow-list and among the names that the user has declared safe
   (``torch.serialization.add_safe_globals``). A pickle never causes an import.
3. A listed callable is called through a function of this package that checks the arguments, so that
   the result is never larger than the stored data.
4. The state of an object can be set only if this load has constructed the object. So the state of a
   class, a function or a singleton is never set.
5. The total size of copies is limited, because a pickle may copy the same text a million times.
"""

from __future__ import annotations

import _compat_pickle
import enum
import io
import pickle
import sys
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torch_ckpt.checkpoint.safe_types import (
    copied_by,
    has_state,
    maker_of,
    named,
    rebuild_declared,
    rebuild_from_type,
    set_state,
    shown,
)
from torch_ckpt.checkpoint.safe_values import EMPTY, as_key, untyped_torch
from torch_ckpt.errors import Unsafe

# The class has no type annotations.
_Interpreter: Any = cast(Any, pickle)._Unpickler

# Names in these modules are refused even if the user has declared them safe, as in torch.
_NEVER = frozenset({"sys", "os", "posix", "nt"})

# torch declares these types safe. They are not called, because creating a mesh communicates with
# other processes and may start a process group. No pickle by torch.save calls them.
_NEVER_CALLED = (DeviceMesh, DTensor)

# Maximum total size of copies, as a multiple of the stored size. Pickles that Python writes stay
# below 2, except for paths, which share their parts.
_MOST_COPIES = 64

# Number of copied bytes that is always allowed, for tiny pickles.
_LEAST_COPIES = 1 << 16

# Destroying nested containers of these types recurses in C without a limit, unlike all others.
_NESTING = (deque, defaultdict)
_DEEPEST_NESTING = 100


class NoSuchDevice(Exception):
    """This process does not have the device of a tensor."""


class Archive:
    """An archive written by ``torch.save``: a pickle and the data of its tensors."""

    def __init__(self, data: bytes | memoryview) -> None:
        self.size = len(data)
        if data[:4] != b"PK\x03\x04":
            raise ValueError("it is not a zip archive")
        with zipfile.ZipFile(io.BytesIO(data)) as directory:
            entries = directory.infolist()
        # Python's and torch's zip readers must list the same entries. Otherwise an archive that
        # passes the checks here could have other contents when torch reads it.
        self._reader = untyped_torch._C.PyTorchFileReader(io.BytesIO(data))
        self._sizes = {entry.filename.partition("/")[2]: entry.file_size for entry in entries}
        names = self._reader.get_all_records()
        if len(entries) != len(self._sizes) or sorted(names) != sorted(self._sizes):
            raise ValueError(
                "its zip archive has duplicate entries, or Python's and torch's zip readers find "
                "different entries in it"
            )
        if "constants.pkl" in self._sizes:
            raise Unsafe("is a TorchScript program")
        if any(e.compress_type != zipfile.ZIP_STORED for e in entries):
            raise ValueError("its zip archive has compressed entries")
        if sum(self._sizes.values()) > len(data):
            raise ValueError("its zip archive has overlapping entries")
        order = bytes(self.record("byteorder")) if "byteorder" in self._sizes else b"little"
        if order.decode() != sys.byteorder:
            raise ValueError(
                f"it was saved on a machine with another byte order ({order.decode()!r})"
            )
        self._storages: dict[str, torch.UntypedStorage] = {}

    def storage(self, reference: object) -> Any:
        """Returns the storage that a persistent id refers to."""
        if type(reference) is not tuple or len(reference) != 5:
            raise ValueError("its pickle has a malformed reference to a storage")
        kind, storage_type, key, location, count = reference
        # Refuse other types: converting them to text could use any amount of memory.
        if type(key) is not str or type(location) is not str or type(count) is not int:
            raise ValueError("its pickle has a malformed reference to a storage")
        if kind != "storage":
            raise ValueError("its pickle has a malformed reference to a storage")
        dtype = torch.uint8 if storage_type is torch.UntypedStorage else storage_type.dtype
        size = count * untyped_torch._utils._element_size(dtype)
        if self._sizes.get(f"data/{key}") != size:
            raise ValueError(
                f"its storage {key} does not have the {size} bytes that the pickle states"
            )
        untyped = self._storages.get(key)
        if untyped is None:
            read = self._reader.get_storage_from_record(f"data/{key}", size, torch.UntypedStorage)
            untyped = read._typed_storage()._untyped_storage
            try:
                untyped = untyped_torch.serialization.default_restore_location(untyped, location)
            except RuntimeError as error:
                raise NoSuchDevice(f"{location[:100]}: {error}") from None
            self._storages[key] = untyped
        return untyped_torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)

    def record(self, name: str) -> bytes:
        """Returns the contents of an entry."""
        record: bytes = self._reader.get_record(name)
        if len(record) != self._sizes[name]:
            raise ValueError(f"its zip archive has two entries named {name}")
        return record


# Derived from the pickle interpreter that is written in Python, because the C implementation has no
# hooks for calls.
class Unpickler(_Interpreter):  # type: ignore[misc]
    def __init__(self, archive: Archive) -> None:
        super().__init__(io.BytesIO(archive.record("data.pkl")), encoding="utf-8")
        self.persistent_load = archive.storage
        self._declared = _declared_safe()
        self._classes = {value for value in self._declared.values() if isinstance(value, type)}
        self._built: dict[int, Any] = {}
        self._copies_left = _MOST_COPIES * archive.size + _LEAST_COPIES
        self._nested: dict[int, tuple[Any, int]] = {}
        self._inside: set[int] = set()

    def find_class(self, module: str, name: str) -> Any:
        if self.proto < 3:
            module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
            module = _compat_pickle.IMPORT_MAPPING.get(module, module)
        if module not in _NEVER:
            full = f"{module}.{name}"
            if full in self._declared:
                return self._declared[full]
            known = named(full)
            if known is not None:
                return known
        raise Unsafe(f"names {module}.{name}, which is not an allow-listed type")

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        function = self.stack[-1]
        if type(arguments) is not tuple:
            raise ValueError("its pickle calls a function without a tuple of arguments")
        if self._is_declared(function):
            self.stack[-1] = self._keep(function(*arguments))
            return
        if function is rebuild_from_type and len(arguments) == 4:
            kind = arguments[1]
            if self._is_declared(kind) and issubclass(kind, torch.Tensor):
                self.stack[-1] = self._keep(rebuild_declared(*arguments))
                return
        maker = maker_of(function)
        if maker is None:
            raise Unsafe(f"calls {shown(function)}, which is not an allow-listed function")
        self._count_copies(arguments)
        self.stack[-1] = self._keep(maker(*arguments))

    def load_newobj(self) -> None:
        arguments = self.stack.pop()
        kind = self.stack.pop()
        if type(arguments) is not tuple:
            raise ValueError("its pickle constructs an object without a tuple of arguments")
        if isinstance(kind, type) and kind in self._classes:
            self.append(self._keep(kind.__new__(kind, *arguments)))
        elif isinstance(kind, type) and kind in EMPTY:
            if arguments:
                raise ValueError(f"its pickle passes arguments to {kind.__name__}")
            self.append(self._keep(kind()))
        else:
            raise Unsafe(f"constructs {shown(kind)}, which is not an allow-listed type")

    def load_build(self) -> None:
        target = self.stack[-2]
        if id(target) not in self._built:
            raise Unsafe(f"sets the state of {shown(target)}, which is not allow-listed")
        if type(target) in self._classes:
            super().load_build()
            return
        state = self.stack.pop()
        self._count_copies((state,))
        set_state(target, state)

    def load_append(self) -> None:
        value = self.stack.pop()
        target = self._list()
        self._nest(target, (value,))
        target.append(value)

    def load_appends(self) -> None:
        values = self.pop_mark()
        target = self._list()
        self._nest(target, values)
        target.extend(values)

    def load_setitem(self) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        target = self._mapping()
        self._nest(target, (value,))
        target[as_key(key)] = value

    def load_setitems(self) -> None:
        values = self.pop_mark()
        target = self._mapping()
        self._nest(target, values[1::2])
        for key, value in zip(values[::2], values[1::2], strict=True):
            target[as_key(key)] = value

    def load_additems(self) -> None:
        values = self.pop_mark()
        if type(self.stack[-1]) is not set:
            raise ValueError("its pickle adds items to a value that is not a set")
        self.stack[-1].update(map(as_key, values))

    def load_frozenset(self) -> None:
        values = self.pop_mark()
        self.append(frozenset(map(as_key, values)))

    def _is_declared(self, function: object) -> bool:
        if any(function is kind for kind in _NEVER_CALLED):
            return False
        return any(function is value for value in self._declared.values())

    def _keep(self, made: Any) -> Any:
        # Enum members are looked up, not constructed. They are shared, so never set their state.
        if isinstance(made, enum.Enum):
            return made
        # Keep the object alive, so that its id is not reused.
        if type(made) in self._classes or has_state(made):
            self._built[id(made)] = made
        if type(made) is deque:
            self._nest(made, made)
        return made

    def _count_copies(self, arguments: tuple[Any, ...]) -> None:
        self._copies_left -= copied_by(arguments)
        if self._copies_left < 0:
            raise ValueError("its pickle expands to far more data than is stored")

    def _nest(self, target: Any, values: Iterable[Any]) -> None:
        """Limits the nesting depth of containers of the types in _NESTING.

        A pickler fills a container before it puts the container into another one. So the depth of
        the inner container is known, provided that it no longer changes.
        """
        if type(target) not in _NESTING:
            return
        depth = self._nested.get(id(target), (target, 0))[1]
        for value in values:
            if type(value) not in _NESTING:
                continue
            if id(target) in self._inside:
                raise ValueError(
                    f"its pickle changes a {type(target).__name__} inside another container"
                )
            self._inside.add(id(value))
            _, inner = self._nested.setdefault(id(value), (value, 0))
            depth = max(depth, inner + 1)
        if depth > _DEEPEST_NESTING:
            raise ValueError(
                f"it has {type(target).__name__}s nested more than {_DEEPEST_NESTING} levels deep"
            )
        self._nested[id(target)] = target, depth

    def _list(self) -> Any:
        target = self.stack[-1]
        if type(target) not in (list, deque) and type(target) not in self._classes:
            raise ValueError("its pickle appends to a value that is not a list")
        return target

    def _mapping(self) -> Any:
        target = self.stack[-1]
        kinds = (dict, OrderedDict, defaultdict, Counter)
        if type(target) not in kinds and type(target) not in self._classes:
            raise ValueError("its pickle sets items of a value that is not a mapping")
        return target


_ALLOWED_OPCODES = """
PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT
BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8
EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS
EMPTY_SET ADDITEMS FROZENSET BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET
GLOBAL STACK_GLOBAL BINPERSID REDUCE NEWOBJ BUILD
"""


class _Table(dict[int, Callable[[Any], None]]):
    def __missing__(self, opcode: int) -> Callable[[Any], None]:
        raise ValueError(f"its pickle has the opcode {opcode:#x}, which is not allow-listed")


def _dispatch() -> _Table:
    table = _Table()
    for name in _ALLOWED_OPCODES.split():
        code = getattr(pickle, name)[0]
        inherited = _Interpreter.dispatch[code]
        table[code] = vars(Unpickler).get(inherited.__name__, inherited)
    return table


def _declared_safe() -> dict[str, Any]:
    """Returns the values that the user has declared safe, by the names that pickles use."""
    declared: dict[str, Any] = {}
    for value in untyped_torch.serialization.get_safe_globals():
        if isinstance(value, tuple):
            value, name = value
            declared[name] = value
        else:
            declared[f"{value.__module__}.{value.__qualname__}"] = value
    return declared


Unpickler.dispatch = _dispatch()
