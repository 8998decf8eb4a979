"""Objects that are listed while threads make and drop others."""

from __future__ import annotations

import gc

from torch_ckpt._base.live_objects import LiveObjects


class Thing:
    """Something that can be referenced weakly."""


def test_others_may_come_and_go_while_they_are_read() -> None:
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


def test_what_nobody_has_any_more_is_not_among_them() -> None:
    live = LiveObjects[Thing]()
    live.add(Thing())
    gc.collect()
    assert list(live) == []
