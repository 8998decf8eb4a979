"""The header of a ``.safetensors`` file.

``u64`` length of the header, JSON, tensors one behind the other. The library of that name writes a
file only from tensors that are all in memory and maps all of a file that it reads; here a tensor is
a range of bytes, so that files may be larger than memory. What it refuses is refused here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn, TypeGuard

import torch

from torch_ckpt.errors import CheckpointError, Corrupt

_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
}

#: dtypes by the format's own names for them.
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, of_torch) for name, of_torch in _NAMES.items() if hasattr(torch, of_torch)
}

_CODES = {dtype: name for name, dtype in DTYPES.items()}

#: The key that does not name a tensor.
METADATA_KEY = "__metadata__"

# The library's own limit, before anything is allocated.
_MOST_HEADER_BYTES = 100_000_000

#: The library's own, too.
MOST_DIMENSIONS = 64


@dataclass(frozen=True)
class Place:
    """A tensor of a file.

    Attributes:
        dtype, shape: of the tensor in torch.
        begin: where its bytes begin in the file.
        nbytes: how many there are.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    nbytes: int


def encode_header(
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], metadata: dict[str, str]
) -> bytes:
    """The bytes of a file before its tensors, which follow in this order without gaps.

    Args:
        tensors: name, dtype, which is one of :data:`DTYPES`, and shape of each.
        metadata: the file's own, for its key ``__metadata__``.

    Raises:
        CheckpointError: they would have more bytes than readers take.
    """
    header: dict[str, Any] = {METADATA_KEY: metadata} if metadata else {}
    begin = 0
    for name, dtype, shape in tensors:
        end = begin + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _CODES[dtype],
            "shape": _logical(dtype, shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MOST_HEADER_BYTES:
        raise CheckpointError(
            f"the header of a safetensors file would have {len(text)} bytes for {len(header)} "
            f"names, more than the {_MOST_HEADER_BYTES} that readers take: convert fewer tensors, "
            "or pass max_shard_size (--max-shard-size)"
        )
    return len(text).to_bytes(8, "little") + text


def read_header(
    stream: BinaryIO, length: int, path: str
) -> tuple[dict[str, Place], dict[str, str]]:
    """The tensors of a file, ascending by their place, and the file's own metadata.

    Args:
        stream: at the beginning of the file.
        length: of the file, in bytes.
        path: of the file, for messages.

    Raises:
        Corrupt: it is not such a file, or it is cut off, or its tensors overlap or leave gaps.
    """

    def refuse(what: str) -> NoReturn:
        raise Corrupt(f"{path} is not a valid safetensors file: {what}")

    head = stream.read(8)
    size = int.from_bytes(head, "little")
    if len(head) < 8 or size > length - 8:
        refuse("it is shorter than its header")
    if size > _MOST_HEADER_BYTES:
        refuse(f"its header has {size} bytes, more than {_MOST_HEADER_BYTES}")
    try:
        header = json.loads(stream.read(size).decode(), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        refuse(f"its header is not JSON of that format ({error})")
    if not isinstance(header, dict):
        refuse("its header is not an object")
    metadata = header.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        refuse(f"{METADATA_KEY} is not an object of texts")
    if not all(is_unicode(text) for item in metadata.items() for text in item):
        refuse(f"{METADATA_KEY} has a text that is not Unicode")
    data = length - 8 - size
    places = []
    for name, entry in header.items():
        if not is_unicode(name):
            refuse(f"the name {name!r} is not Unicode")
        place = _place(entry, data)
        if isinstance(place, str):
            refuse(f"{name}: {place}")
        places.append((name, place))
    places.sort(key=lambda item: (item[1].begin, item[1].nbytes))
    end = 0
    for name, place in places:
        if place.begin != end:
            refuse(f"{name}: its bytes begin at {place.begin}, where those before it end at {end}")
        end += place.nbytes
    if end != data:
        refuse(f"its tensors have {end} bytes, the file has {data} for them")
    first = 8 + size
    return {
        name: Place(place.dtype, place.shape, first + place.begin, place.nbytes)
        for name, place in places
    }, metadata


def is_unicode(name: str) -> bool:
    """Whether a name has no half of a surrogate pair, which UTF-8 cannot say."""
    return not any(0xD800 <= ord(character) <= 0xDFFF for character in name)


def _place(entry: object, data: int) -> Place | str:
    """A tensor by its entry, counted from the end of the header; or what is wrong with it."""
    if not isinstance(entry, dict):
        return "its entry is not an object"
    code, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    dtype = DTYPES.get(code) if isinstance(code, str) else None
    if dtype is None:
        return f"this torch has no dtype for {code!r}"
    if not _are_sizes(shape) or len(shape) > MOST_DIMENSIONS:
        return "its shape is not a list of sizes"
    if not _are_sizes(offsets) or len(offsets) != 2:
        return "its offsets are not two numbers"
    begin, end = offsets
    if not begin <= end <= data:
        return f"its bytes, {begin} to {end}, do not lie in the file, which has {data} for tensors"
    sizes = _physical(dtype, shape)
    if sizes is None or math.prod(sizes) * dtype.itemsize != end - begin:
        return f"{code} {shape} does not take {end - begin} bytes"
    return Place(dtype, sizes, begin, end - begin)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _is_packed(dtype: torch.dtype) -> bool:
    """Whether one element of torch's is two of the format's."""
    return _CODES[dtype] == "F4"


def _logical(dtype: torch.dtype, shape: tuple[int, ...]) -> list[int]:
    return [*shape[:-1], 2 * shape[-1]] if _is_packed(dtype) else list(shape)


def _physical(dtype: torch.dtype, shape: list[int]) -> tuple[int, ...] | None:
    if not _is_packed(dtype):
        return tuple(shape)
    if not shape or shape[-1] % 2:
        return None
    return (*shape[:-1], shape[-1] // 2)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found
