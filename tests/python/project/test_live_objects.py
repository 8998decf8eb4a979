"""Lists of objects while threads make and drop others."""

from __future__ import annotations

import gc

from torch_ckpt._base.life_cycle import LiveObjects


class Thing:
    """Object that can be referenced weakly."""


def test_the_list_can_be_read_while_objects_are_made_and_dropped() -> None:
    live = LiveObjects[Thing]()
    kept, late = [Thing() for _ in range(3)], Thing()
    for thing in kept:
        live.add(thing)
    read = []
    for thing in live:
        read.append(thing)
        live.add(late)
        live.discard(kept[0])
    assert read == kept
    assert set(live) == {kept[1], kept[2], late}


def test_dropped_objects_are_not_in_the_list() -> None:
    live = LiveObjects[Thing]()
    live.add(Thing())
    gc.collect()
    assert list(live) == []
