"""Encodes and decodes the header of a ``.safetensors`` file.

A file consists of the length of the header as a ``u64``, the header as JSON, and the tensors,
without gaps. The safetensors library needs all tensors in memory to write a file, and maps the
entire file to read it. This module returns each tensor's byte range instead, so files may be larger
than memory. It rejects every file that the library rejects.
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

#: dtypes by name in the format.
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, of_torch) for name, of_torch in _NAMES.items() if hasattr(torch, of_torch)
}

_CODES = {dtype: name for name, dtype in DTYPES.items()}

#: Key of the file's own metadata, which is not a tensor.
METADATA_KEY = "__metadata__"

# Limit of the safetensors library. It also limits the memory allocated for a damaged file.
_MAX_HEADER_BYTES = 100_000_000

#: Limit of the safetensors library.
MAX_DIMENSIONS = 64


@dataclass(frozen=True)
class TensorRange:
    """A tensor in a file, and its byte range."""

    dtype: torch.dtype
    shape: tuple[int, ...]  # in torch
    begin: int  # offset in the file, in bytes
    nbytes: int


def encode_header(
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], metadata: dict[str, str]
) -> bytes:
    """Returns the bytes before the tensors, which must follow in this order without gaps.

    Args:
        tensors: name, dtype (one of :data:`DTYPES`) and shape of each tensor.
        metadata: the file's metadata, stored under ``__metadata__``.

    Raises:
        CheckpointError: the header would be larger than readers accept.
    """
    header: dict[str, Any] = {METADATA_KEY: metadata} if metadata else {}
    begin = 0
    for name, dtype, shape in tensors:
        end = begin + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _CODES[dtype],
            "shape": _format_shape(dtype, shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER_BYTES:
        raise CheckpointError(
            f"the header of the safetensors file would have {len(text)} bytes for {len(header)} "
            f"names, but readers accept at most {_MAX_HEADER_BYTES}. Convert fewer tensors, or "
            "pass max_shard_size (--max-shard-size)"
        )
    return len(text).to_bytes(8, "little") + text


def read_header(
    stream: BinaryIO, length: int, path: str
) -> tuple[dict[str, TensorRange], dict[str, str]]:
    """Reads the byte ranges of a file's tensors, sorted by offset, and the file's metadata.

    Args:
        stream: the file, positioned at its start.
        length: length of the file in bytes.
        path: path of the file, for error messages.

    Raises:
        Corrupt: the file is not a safetensors file, it is truncated, or its tensors overlap or
            leave gaps.
    """

    def refuse(what: str) -> NoReturn:
        raise Corrupt(f"{path} is not a valid safetensors file: {what}")

    head = stream.read(8)
    size = int.from_bytes(head, "little")
    if len(head) < 8 or size > length - 8:
        refuse("the file is shorter than its header")
    if size > _MAX_HEADER_BYTES:
        refuse(f"the header has {size} bytes, more than the limit of {_MAX_HEADER_BYTES}")
    try:
        header = json.loads(stream.read(size).decode(), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        refuse(f"the header is not valid JSON ({error})")
    if not isinstance(header, dict):
        refuse("the header is not a JSON object")
    metadata = header.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        refuse(f"{METADATA_KEY} is not a JSON object whose values are strings")
    if not all(is_unicode(text) for item in metadata.items() for text in item):
        refuse(f"{METADATA_KEY} contains a string that is not Unicode")
    data_bytes = length - 8 - size
    ranges = []
    for name, entry in header.items():
        if not is_unicode(name):
            refuse(f"the name {name!r} is not Unicode")
        found = _parse_entry(entry, data_bytes)
        if isinstance(found, str):
            refuse(f"{name}: {found}")
        ranges.append((name, found))
    ranges.sort(key=lambda item: (item[1].begin, item[1].nbytes))
    end = 0
    for name, found in ranges:
        if found.begin != end:
            refuse(
                f"{name}: its data starts at {found.begin}, but the preceding data ends at {end}"
            )
        end += found.nbytes
    if end != data_bytes:
        refuse(f"the tensors take {end} bytes, but the file has {data_bytes} bytes of data")
    first = 8 + size
    return {
        name: TensorRange(found.dtype, found.shape, first + found.begin, found.nbytes)
        for name, found in ranges
    }, metadata


def is_unicode(name: str) -> bool:
    """True if a name can be encoded as UTF-8, that is, has no unpaired surrogates."""
    return not any(0xD800 <= ord(character) <= 0xDFFF for character in name)


def _parse_entry(entry: object, data_bytes: int) -> TensorRange | str:
    """Parses a tensor's entry; returns a description of the error if the entry is invalid.

    Offsets are relative to the end of the header.
    """
    if not isinstance(entry, dict):
        return "its entry is not a JSON object"
    code, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    dtype = DTYPES.get(code) if isinstance(code, str) else None
    if dtype is None:
        return f"this version of torch has no dtype for {code!r}"
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        return f"its shape is not a list of at most {MAX_DIMENSIONS} sizes"
    if not _are_sizes(offsets) or len(offsets) != 2:
        return "its data_offsets are not two sizes"
    begin, end = offsets
    if not begin <= end <= data_bytes:
        return f"its data_offsets [{begin}, {end}] exceed the {data_bytes} bytes of data"
    sizes = _torch_shape(dtype, shape)
    if sizes is None or math.prod(sizes) * dtype.itemsize != end - begin:
        return f"a {code} tensor of shape {shape} does not take {end - begin} bytes"
    return TensorRange(dtype, sizes, begin, end - begin)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _is_packed(dtype: torch.dtype) -> bool:
    """True if one element in torch holds two elements of the format."""
    return _CODES[dtype] == "F4"


def _format_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> list[int]:
    """Converts a torch shape to the format's shape."""
    return [*shape[:-1], 2 * shape[-1]] if _is_packed(dtype) else list(shape)


def _torch_shape(dtype: torch.dtype, shape: list[int]) -> tuple[int, ...] | None:
    """Converts the format's shape to a torch shape; None if the elements cannot be packed."""
    if not _is_packed(dtype):
        return tuple(shape)
    if not shape or shape[-1] % 2:
        return None
    return (*shape[:-1], shape[-1] // 2)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice")
    return found
