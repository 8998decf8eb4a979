"""The byte ranges of a record that a load reads, which must be fetched before the engine reads.

The engine chooses its reads in csrc/planning and csrc/engine/read_pipeline.cpp. The ranges computed
here always cover them: small gaps are included, as in the engine, and so are complete checksummed
blocks, wherever in the record the payload begins.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod

Range = tuple[int, int]

#: Gaps of up to this many unwanted bytes are read, too. At least the engine's limit of 64 KiB.
GAP_BYTES = 256 << 10

#: Records of up to this many bytes are read completely. At least the engine's limit of 256 KiB.
SMALL_BYTES = 256 << 10

# The engine reads at least this many bytes at both ends of a record: kEndsBytes of
# record_reader.cpp.
_ENDS_BYTES = 2048

# With more bytes around its payload, a record is not that of a tensor as torch writes it.
_MOST_ENVELOPE_BYTES = 1 << 20

# Limit of the ranges in one record. Beyond it, gaps are read, too (kMostRanges of read_plan.cpp).
_MOST_RANGES = 1 << 20

_TABLE_HEAD = struct.Struct("<4sI")
_TABLE_ENTRY = struct.Struct("<QII")


def coalesced(ranges: Iterable[Range], gap: int = GAP_BYTES) -> list[Range]:
    """Merges ranges with gaps of at most ``gap`` bytes between them. Returns them in ascending
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
    """Returns the number of bytes at each end of a record that contain everything but the payload;
    None if the record is not one of a tensor as torch writes it."""
    envelope = length - payload_bytes
    return max(envelope, _ENDS_BYTES) if 0 <= envelope <= _MOST_ENVELOPE_BYTES else None


def record_ranges(
    wanted: Iterable[Range], length: int, payload_bytes: int, block_bytes: int
) -> list[Range]:
    """Returns the byte ranges of a record that contain wanted ranges of its payload, and all bytes
    that are needed to verify them.

    Args:
        wanted: ranges of the payload.
        length: length of the record, for which :func:`ends_of_record` is not None.
        payload_bytes: length of the payload.
        block_bytes: length of the blocks that have checksums; 1 if there are none.
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
    """Reads the sizes of checksummed blocks, in bytes, by the offset of the record in its file.

    Args:
        table: a checksum table (docs/format.md). A damaged one yields sizes that may be wrong; the
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
