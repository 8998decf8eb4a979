"""What a checkpoint's metadata may say.

Unpickling restricts which classes come, and not what is in their fields. Here the type and the
range of everything that is used later are checked, once, before anything is opened or allocated;
what comes after may rely on it. Attributes that nobody uses are not looked at: torch's next version
may have more of them, and other libraries keep things of theirs beside the metadata.

Checked by subtraction, in Python's integers, which do not overflow.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from itertools import chain, pairwise
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldProperties
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torch_ckpt.checkpoint.files import lies_beneath, outside
from torch_ckpt.errors import Corrupt, Unsafe

#: Bytes and elements are counted in 63 bits, here and in the engine.
MOST_BYTES = 2**63 - 1

#: torch's own limit.
MOST_DIMENSIONS = 64

#: More than anybody's; each place may name the same long list.
MOST_TRANSFORMS = 64

# Elements of which those of any dtype fit into 63 bits of bytes.
_MANY = MOST_BYTES // 64

# Offset and length in bytes, and whose.
_Range = tuple[int, int, str]


def check_metadata(metadata: Metadata, source: str) -> None:
    """Checks all of it.

    Args:
        source: where it was read, for messages.

    Raises:
        Unsafe: data lies outside of the checkpoint's directory.
        Corrupt: anything else that cannot be, by the name of the entry.
    """
    try:
        _check(metadata)
    except (Corrupt, Unsafe) as error:
        raise type(error)(f"{error} ({source})") from None


def _check(metadata: Metadata) -> None:
    stored = getattr(metadata, "state_dict_metadata", None)
    if type(stored) is not dict:
        raise Corrupt(f"state_dict_metadata is {_kind(stored)}, not a dict")
    _check_items(stored)
    _check_places(metadata)
    _check_paths_of_planner(metadata, len(stored))
    meta = getattr(metadata, "storage_meta", None)
    if meta is not None and not isinstance(meta, StorageMeta):
        raise Corrupt(f"storage_meta is {_kind(meta)}, not a StorageMeta")
    _check_tables(metadata)


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"


# --- items ---------------------------------------------------------------------------------------


def _check_items(stored: dict[Any, Any]) -> None:
    # In checkpoints of ours equal parts are shared. What has been checked is known by its identity,
    # which holds while the metadata does.
    checked: set[tuple[int, int, int]] = set()
    properties_checked: set[int] = set()
    lists_checked: set[int] = set()
    # torch.Size has nothing but numbers, so that equal ones are alike.
    products: dict[torch.Size, int] = {}
    for name, item in stored.items():
        if type(name) is not str:
            raise Corrupt(f"state_dict_metadata has a key that is {_kind(name)}")
        if type(item) is BytesStorageMetadata:
            continue
        if type(item) is not TensorStorageMetadata:
            raise Corrupt(f"{name}: the metadata describes it by {_kind(item)}")
        try:
            properties, size, chunks = item.properties, item.size, item.chunks
        except AttributeError as error:
            raise Corrupt(f"{name}: the metadata does not have all of its description") from error
        if type(chunks) is not list:
            raise Corrupt(f"{name}: the metadata has {_kind(chunks)} instead of its shards")
        if len(chunks) == 1:
            key = id(properties), id(size), id(chunks[0])
            if key in checked:
                continue
            checked.add(key)
        if id(properties) not in properties_checked:
            _check_properties(name, properties)
            properties_checked.add(id(properties))
        count = products.get(size) if type(size) is torch.Size else None
        if count is None:
            count = _check_size(name, size, "a size")
            if type(size) is torch.Size:
                products[size] = count
        if count > _MANY:
            _check_bytes(name, properties, count)
        if len(chunks) == 1 and _is_whole(chunks[0], size):
            continue
        if len(chunks) > 1:
            # Each name would ask for the work of all of them, and torch shares none.
            if id(chunks) in lists_checked:
                raise Corrupt(f"{name}: the metadata gives it the shards of another tensor")
            lists_checked.add(id(chunks))
        _check_chunks(name, size, count, chunks)


def _is_whole(chunk: Any, size: Any) -> bool:
    """Whether a shard is the whole of a tensor whose size has been checked."""
    return (
        type(chunk) is ChunkStorageMetadata
        and {"sizes", "offsets"} <= vars(chunk).keys()
        and type(chunk.sizes) is torch.Size is type(chunk.offsets)
        and chunk.sizes == size
        and len(chunk.offsets) == len(size)
        and not any(chunk.offsets)
    )


def _check_properties(name: str, properties: Any) -> None:
    if type(properties) not in (TensorProperties, OldProperties):
        raise Corrupt(f"{name}: the metadata has {_kind(properties)} instead of its properties")
    dtype = getattr(properties, "dtype", None)
    if type(dtype) is not torch.dtype:
        raise Corrupt(f"{name}: the metadata says that its dtype is {_kind(dtype)}")


def _check_size(name: str, size: Any, what: str) -> int:
    """The product of numbers that are sizes or offsets."""
    if type(size) is not torch.Size and type(size) is not tuple:
        raise Corrupt(f"{name}: the metadata has {_kind(size)} instead of {what}")
    if len(size) > MOST_DIMENSIONS:
        raise Corrupt(
            f"{name}: the metadata has {what} of {len(size)} dimensions, "
            f"more than {MOST_DIMENSIONS}"
        )
    for number in size:
        if type(number) is not int or not 0 <= number <= MOST_BYTES:
            raise Corrupt(f"{name}: the metadata has {what} of {_number(number)}")
    return math.prod(size)


def _number(value: object) -> str:
    """For messages: 2**1000000 is an int as well."""
    if type(value) is not int:
        return f"{_kind(value)}, which is not a count"
    if value < 0:
        return f"{max(value, -(2**64))}, which is not a count"
    return "2**63 or more" if value > MOST_BYTES else str(value)


def _check_bytes(name: str, properties: Any, count: int) -> None:
    try:
        item = properties.dtype.itemsize
    except RuntimeError:
        item = 1  # of dtypes without a size of their own, which cannot be loaded
    if count > MOST_BYTES // max(item, 1):
        raise Corrupt(f"{name}: the metadata says that it has 2**63 or more bytes")


def _check_chunks(name: str, size: Any, count: int, chunks: Any) -> None:
    held = 0
    for chunk in chunks:
        if type(chunk) is not ChunkStorageMetadata:
            raise Corrupt(f"{name}: the metadata has {_kind(chunk)} instead of a shard")
        try:
            offsets, sizes = chunk.offsets, chunk.sizes
        except AttributeError as error:
            raise Corrupt(f"{name}: the metadata has a shard without a place") from error
        _check_size(name, offsets, "a shard's offset")
        elements = _check_size(name, sizes, "a shard's size")
        inside = len(offsets) == len(sizes) == len(size) and all(
            begin <= end and length <= end - begin
            for begin, length, end in zip(offsets, sizes, size, strict=True)
        )
        if not inside:
            raise Corrupt(
                f"{name}: the metadata has a shard of {list(sizes)} at {list(offsets)}, which is "
                f"outside of the tensor of {list(size)}"
            )
        held += elements
        if held > count:
            # One shard many times over is how little metadata asks for much work.
            raise Corrupt(
                f"{name}: the metadata has shards with more elements than the {count} of the "
                "tensor; they overlap"
            )


# --- places --------------------------------------------------------------------------------------


def _check_places(metadata: Metadata) -> None:
    places = getattr(metadata, "storage_data", None)
    if places is None:
        return
    if type(places) is not dict:
        raise Corrupt(f"storage_data is {_kind(places)}, not a dict")
    files: dict[str, list[_Range]] = {}
    most = MOST_BYTES
    for index, info in places.items():
        if type(index) is not MetadataIndex:
            raise Corrupt(f"storage_data has a key that is {_kind(index)}")
        # What an index has beside its name is only compared.
        name = index.fqn
        if type(name) is not str:
            raise Corrupt(f"storage_data has an index whose name is {_kind(name)}")
        if type(info) is not _StorageInfo:
            raise Corrupt(f"{name}: the metadata has {_kind(info)}, not its place in a file")
        try:
            file, offset, length = info.relative_path, info.offset, info.length
        except AttributeError as error:
            raise Corrupt(f"{name}: the metadata says only in part where it is stored") from error
        if type(file) is not str:
            raise outside(name, file)
        ranges = files.get(file)
        if ranges is None:
            if not lies_beneath(file):
                raise outside(name, file)
            spelled = _plain(file) if "/" in file else file
            ranges = files[file] = files.setdefault(spelled, [])
        if type(offset) is not int or type(length) is not int:
            raise Corrupt(
                f"{name}: the metadata says that it is stored at {_number(offset)}, "
                f"in {_number(length)} bytes"
            )
        if not (0 <= offset <= most and 0 <= length <= most - offset):
            raise Corrupt(
                f"{name}: the metadata says that it is stored at byte {_number(offset)}, in "
                f"{_number(length)} bytes; that ends nowhere in a file"
            )
        if info.transform_descriptors is not None:
            _check_transforms(name, info.transform_descriptors)
        if length:
            ranges.append((offset, length, name))
    for file, ranges in files.items():
        if len(ranges) > 1:
            _check_overlaps(file, ranges)


def _plain(file: str) -> str:
    """Of several spellings of a path, one."""
    return "/".join(part for part in file.split("/") if part not in ("", "."))


def _check_transforms(name: str, transforms: Any) -> None:
    if type(transforms) in (list, tuple) and len(transforms) > MOST_TRANSFORMS:
        raise Corrupt(
            f"{name}: the metadata has {len(transforms)} transforms, more than {MOST_TRANSFORMS}"
        )
    if type(transforms) not in (list, tuple) or not all(type(t) is str for t in transforms):
        raise Corrupt(f"{name}: the metadata has {_kind(transforms)} instead of its transforms")


def _check_overlaps(file: str, ranges: list[_Range]) -> None:
    ranges.sort()
    for (offset, length, name), (next_offset, _length, next_name) in pairwise(ranges):
        # A small file could stand for a large load.
        if length > next_offset - offset:
            raise Corrupt(
                f"{name}: the metadata says that it has {length} bytes from {offset} on in {file}, "
                f"and {next_name} begins amid them, at {next_offset}"
            )


# --- the rest ------------------------------------------------------------------------------------


def _check_paths_of_planner(metadata: Metadata, count: int) -> None:
    """torch fills lists up to an index that it finds in such a path."""
    paths = getattr(metadata, "planner_data", None)
    if not isinstance(paths, dict):
        return  # some planner's own, which torch makes nothing of
    # One long path may stand for many names.
    distinct = {id(path): (name, _parts(path)) for name, path in paths.items()}.values()
    if int not in set(map(type, chain.from_iterable(parts for _, parts in distinct))):
        return
    most = max(count, len(paths))
    for name, parts in distinct:
        for part in parts:
            if type(part) is int and not 0 <= part < most:
                raise Corrupt(
                    f"{name}: the metadata places it in a list at {_number(part)}, and there are "
                    f"{most} names"
                )


def _parts(path: object) -> Collection[object]:
    """What torch finds in a path by an index, of whatever type it is."""
    if isinstance(path, dict):
        return path.values()
    return path if isinstance(path, (tuple, list)) else ()


def _check_tables(metadata: Metadata) -> None:
    ours = getattr(metadata, "torch_ckpt", None)
    if ours is None:
        return
    if type(ours) is not dict or type(ours.get("version")) is not int:
        raise Corrupt("torch_ckpt, which has the checksums, is damaged")
    if ours["version"] != 1:
        return
    tables = ours.get("checksums")
    if type(tables) is not dict:
        raise Corrupt(f"the checksums are {_kind(tables)}, not a dict")
    for file, table in tables.items():
        if type(file) is not str or type(table) is not bytes:
            raise Corrupt(f"the checksums of {file!r:.200} are {_kind(table)}")
