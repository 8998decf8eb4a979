"""Computes the byte ranges of records that must be fetched before the engine reads them.

The engine chooses its reads in csrc/planning and csrc/engine/read_pipeline.cpp. The ranges computed
here always cover these reads, whatever the payload's position in the record. Like the engine's
reads, they include small gaps and complete checksummed blocks.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod

Range = tuple[int, int]

#: Gaps of up to this many bytes are read, too. Must be at least the engine's limit of 64 KiB.
GAP_BYTES = 256 << 10

#: Records of up to this many bytes are read in full. Must be at least the engine's limit, 256 KiB.
SMALL_BYTES = 256 << 10

# The engine reads at least this many bytes at each end of a record (kEndsBytes in
# record_reader.cpp).
_ENDS_BYTES = 2048

# A record with more bytes than this around its payload does not have torch's layout for a tensor.
_MOST_ENVELOPE_BYTES = 1 << 20

# Maximum number of ranges in one record; if there would be more, large gaps are read, too
# (kMostRanges in read_plan.cpp).
_MOST_RANGES = 1 << 20

_TABLE_HEAD = struct.Struct("<4sI")
_TABLE_ENTRY = struct.Struct("<QII")


def coalesced(ranges: Iterable[Range], gap: int = GAP_BYTES) -> list[Range]:
    """Merges ranges that are separated by at most ``gap`` bytes. Returns them in ascending
    order."""
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
    """Yields the byte ranges of a box in a row-major tensor, in ascending order. Small gaps are
    included."""
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
        range_count = prod(of for of, _stride in loops)
        if stride - extent > GAP_BYTES and range_count <= _MOST_RANGES:
            break
        extent += (count - 1) * stride
        loops.pop(0)
    for steps in product(*(range(0, count * stride, stride) for count, stride in reversed(loops))):
        first = begin + sum(steps)
        yield first, first + extent


def ends_of_record(length: int, payload_bytes: int) -> int | None:
    """Returns the number of bytes to read at each end of a record to get everything but the
    payload; None if the record does not have torch's layout for a tensor."""
    envelope = length - payload_bytes
    return max(envelope, _ENDS_BYTES) if 0 <= envelope <= _MOST_ENVELOPE_BYTES else None


def record_ranges(
    wanted: Iterable[Range], length: int, payload_bytes: int, block_bytes: int
) -> list[Range]:
    """Returns the byte ranges of a record that contain the wanted ranges of its payload, and all
    bytes that are needed to verify them.

    Args:
        wanted: ranges of the payload.
        length: length of the record; :func:`ends_of_record` must not return None for it.
        payload_bytes: length of the payload.
        block_bytes: length of the checksummed blocks; 1 if there are none.
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
    """Returns the sizes of checksummed blocks, in bytes, by the record's offset in its file.

    Args:
        table: a checksum table (docs/format.md). If it is damaged, the sizes may be wrong; the
            engine refuses it later.
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
