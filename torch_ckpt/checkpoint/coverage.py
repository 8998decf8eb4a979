"""Whether what is stored of a tensor is all of it: a save that lost a shard is not loaded.

Counting elements is enough where there is one shard. Two that overlap have as many as there are,
and do not reach all: then shards are looked at as boxes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch_ckpt import _core
from torch_ckpt.errors import Corrupt

#: Offsets and sizes, by dimension.
Box = tuple[Sequence[int], Sequence[int]]


def require_all(
    name: str, wanted: Sequence[int], boxes: Sequence[Box], offsets: Sequence[int]
) -> None:
    """Raises Corrupt where boxes do not fill what is wanted of a tensor.

    Args:
        wanted: its size.
        boxes: what is stored of it, counted from where it begins.
        offsets: where it begins in the tensor.
    """
    count = math.prod(wanted)
    planned = sum(math.prod(sizes) for _, sizes in boxes)
    if planned < count:
        raise Corrupt(
            f"{name}: the shards in the metadata hold only {planned} of the {count} wanted "
            "elements; the save that wrote it was incomplete"
        )
    if len(boxes) > 1:
        gap = gap_in(tuple(wanted), boxes)
        if gap is not None:
            place = [begin + inner for begin, inner in zip(offsets, gap, strict=True)]
            raise Corrupt(
                f"{name}: shards in the metadata overlap, and none of them holds element {place}; "
                "the save that wrote it was incomplete"
            )


def gap_in(whole: tuple[int, ...], boxes: Sequence[Box]) -> list[int] | None:
    """The first element that none of the boxes has, all of which lie in a tensor of that size."""
    if 0 in whole or _core.tile(whole, [box for box in boxes if 0 not in box[1]]):
        return None
    return _gap(whole, [tuple(zip(*box, strict=True)) for box in boxes])


def _gap(whole: tuple[int, ...], boxes: list[tuple[tuple[int, int], ...]]) -> list[int] | None:
    """The same; offset and length of a box, by dimension."""
    if 0 in whole:
        return None
    if not boxes:
        return [0] * len(whole)
    if not whole:
        return None
    # Between two cuts across the first dimension the same boxes lie side by side.
    cuts = sorted({0, *(edge for box in boxes for edge in (box[0][0], sum(box[0])))} - {whole[0]})
    seen: dict[frozenset[tuple[tuple[int, int], ...]], list[int] | None] = {}
    for begin in cuts:
        across = frozenset(b[1:] for b in boxes if b[0][0] <= begin < sum(b[0]))
        if not across:
            return [begin] + [0] * (len(whole) - 1)
        if across not in seen:
            seen[across] = _gap(whole[1:], list(across))
        inner = seen[across]
        if inner is not None:
            return [begin, *inner]
    return None
