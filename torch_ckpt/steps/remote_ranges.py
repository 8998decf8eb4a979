"""Which bytes of a record a load touches, for those who must have them at hand before.

The engine decides what it reads in csrc/planning and csrc/engine/read_pipeline.cpp. What is found
here is never less: gaps that it reads over are read over here, and whole checksummed blocks are
taken, wherever in the record the payload begins.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod

Range = tuple[int, int]

#: Unwanted bytes that are read over. No less than the engine's own, 64 KiB.
GAP_BYTES = 256 << 10

#: Records up to this size are read whole. No less than the engine's own, 256 KiB.
SMALL_BYTES = 256 << 10

# Both ends of a record that the engine looks at, at least: kEndsBytes of record_reader.cpp.
_ENDS_BYTES = 2048

# More than this around a payload is not a record of a tensor as torch writes it.
_MOST_ENVELOPE_BYTES = 1 << 20

# Of one record: above this, more is read than is wanted (kMostRanges of read_plan.cpp).
_MOST_RANGES = 1 << 20

_TABLE_HEAD = struct.Struct("<4sI")
_TABLE_ENTRY = struct.Struct("<QII")


def coalesced(ranges: Iterable[Range], gap: int = GAP_BYTES) -> list[Range]:
    """The same bytes in ascending ranges, which are further than ``gap`` bytes apart."""
    united: list[Range] = []
    for begin, end in sorted(ranges):
        if begin == end:
            continue
        if united and begin - united[-1][1] <= gap:
            united[-1] = united[-1][0], max(united[-1][1], end)
        else:
            united.append((begin, end))
    return united


def box_ranges(
    sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], item_bytes: int
) -> Iterator[Range]:
    """The bytes of a box in a row-major tensor, read over small gaps; ascending."""
    if 0 in lengths:
        return
    begin, stride = 0, item_bytes
    loops: list[Range] = []  # (count, stride in bytes), from the innermost outwards
    for size, offset, length in reversed(list(zip(sizes, offsets, lengths, strict=True))):
        begin += offset * stride
        if length > 1:
            if loops and stride == prod(loops[-1]):
                loops[-1] = loops[-1][0] * length, loops[-1][1]
            else:
                loops.append((length, stride))
        stride *= size
    extent = item_bytes
    while loops:
        count, stride = loops[0]
        apart = prod(of for of, _stride in loops)
        if stride - extent > GAP_BYTES and apart <= _MOST_RANGES:
            break
        extent += (count - 1) * stride
        loops.pop(0)
    for place in product(*(range(0, count * stride, stride) for count, stride in reversed(loops))):
        first = begin + sum(place)
        yield first, first + extent


def ends_of_record(length: int, payload_bytes: int) -> int | None:
    """How many bytes at either end hold all that is not payload; None: it is not a usual record."""
    envelope = length - payload_bytes
    return max(envelope, _ENDS_BYTES) if 0 <= envelope <= _MOST_ENVELOPE_BYTES else None


def record_ranges(
    wanted: Iterable[Range], length: int, payload_bytes: int, block_bytes: int
) -> list[Range]:
    """The bytes of a record that hold the wanted ones of its payload, and what verifies them.

    Args:
        wanted: ranges of the payload.
        length: of the record, whose ends :func:`ends_of_record` knows.
        payload_bytes: of the whole payload.
        block_bytes: of the blocks that have checksums; 1 where there are none.
    """
    ends = ends_of_record(length, payload_bytes)
    assert ends is not None
    found = [(0, min(ends, length)), (max(0, length - ends), length)]
    envelope = length - payload_bytes
    for begin, end in coalesced(wanted):
        begin -= begin % block_bytes
        end += -end % block_bytes
        # The payload begins somewhere in the first `envelope` bytes.
        found.append((begin, min(end, payload_bytes) + envelope))
    return coalesced(found)


def block_sizes(table: bytes) -> dict[int, int]:
    """The sizes of checksummed blocks, in bytes, by the offsets of their records in the file.

    Args:
        table: a checksum table (docs/format.md); the engine refuses a damaged one.
    """
    if len(table) < _TABLE_HEAD.size:
        return {}
    _magic, count = _TABLE_HEAD.unpack_from(table)
    entries = memoryview(table)[_TABLE_HEAD.size :][: count * _TABLE_ENTRY.size]
    if len(entries) < count * _TABLE_ENTRY.size:
        return {}
    return {
        offset: 1 << (kind_and_blocks & 0x3F)
        for offset, _crc, kind_and_blocks in _TABLE_ENTRY.iter_unpack(entries)
        if kind_and_blocks & 0x7F
    }
