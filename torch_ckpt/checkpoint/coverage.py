"""Checks that shards cover a tensor, so that a checkpoint with a lost shard is not loaded.

For a single shard, it is enough to count elements. Several shards may have enough elements in total
but overlap and leave a gap, so their positions are checked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch_ckpt import _core
from torch_ckpt.errors import Corrupt

#: Offsets and sizes, one per dimension.
Box = tuple[Sequence[int], Sequence[int]]


def require_all(
    name: str, wanted: Sequence[int], boxes: Sequence[Box], offsets: Sequence[int]
) -> None:
    """Raises Corrupt if boxes do not cover the wanted part of a tensor.

    Args:
        wanted: size of the wanted part.
        boxes: offsets and sizes of the stored shards, relative to the wanted part.
        offsets: offsets of the wanted part in the tensor.
    """
    count = math.prod(wanted)
    planned = sum(math.prod(sizes) for _, sizes in boxes)
    if planned < count:
        raise Corrupt(
            f"{name}: the shards in the metadata contain only {planned} of the {count} wanted "
            "elements; the save that wrote them was incomplete"
        )
    if len(boxes) > 1:
        gap = gap_in(tuple(wanted), boxes)
        if gap is not None:
            place = [begin + inner for begin, inner in zip(offsets, gap, strict=True)]
            raise Corrupt(
                f"{name}: shards in the metadata overlap, and none of them contains element "
                f"{place}; the save that wrote them was incomplete"
            )


def gap_in(whole: tuple[int, ...], boxes: Sequence[Box]) -> list[int] | None:
    """Returns the first element of a tensor that no box covers, or None if there is none.

    Args:
        whole: size of the tensor, which contains all boxes.
    """
    if 0 in whole or _core.tile(whole, [box for box in boxes if 0 not in box[1]]):
        return None
    return _gap(whole, [tuple(zip(*box, strict=True)) for box in boxes])


def _gap(whole: tuple[int, ...], boxes: list[tuple[tuple[int, int], ...]]) -> list[int] | None:
    """Implements :func:`gap_in`. A box is one (offset, length) pair per dimension."""
    if 0 in whole:
        return None
    if not boxes:
        return [0] * len(whole)
    if not whole:
        return None
    # Cut the first dimension at the edges of all boxes. Between two cuts, the set of boxes is
    # constant.
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
