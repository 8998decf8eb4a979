"""The metadata places data where no data can be.

The attacker hopes for an overflow in a sum, for a read outside of the file, or for memory to be
allocated by a length that nothing stands behind. Every number must be refused by name, before
anything is opened or allocated.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.attacks.support import Checkpoint
from torch_ckpt import CheckpointError, Corrupt

#: Not a number of bytes: refused when the metadata is read.
IMPOSSIBLE = {
    "-1": -1,
    "-2**63": -(2**63),
    "2**63": 2**63,
    "2**64": 2**64,
    "2**64 - 1": 2**64 - 1,
    "a bool": True,
    "a float": 4.0,
    "NaN": float("nan"),
    "a str": "0",
    "a tuple": (0,),
}

#: Past the end of the file: refused when it is opened, the sum where the metadata is read.
PAST_THE_END = {"2**40": 2**40, "2**62": 2**62, "2**63 - 1": 2**63 - 1}

CASES = {
    f"{field} of {what}": (field, value)
    for field, (what, value) in itertools.product(
        ("offset", "length"), (IMPOSSIBLE | PAST_THE_END).items()
    )
}


def spoil(c: Checkpoint, case: str) -> str:
    """Spoils what lies last in the file, and so overlaps nothing; returns its name."""
    c.of_stock()
    field, value = CASES[case]
    index, place = max(c.metadata.storage_data.items(), key=lambda item: item[1].offset)
    setattr(place, field, value)
    c.publish()
    return str(index.fqn)


@pytest.mark.parametrize("case", [c for c in CASES if c.split(" of ")[1] in IMPOSSIBLE])
def test_a_number_that_is_none_is_refused(checkpoint: Checkpoint, case: str) -> None:
    name = spoil(checkpoint, case)
    checkpoint.assert_stopped(case, Corrupt, says=f"{name}: the metadata gives it the file offset")


@pytest.mark.parametrize("case", [c for c in CASES if c.split(" of ")[1] in PAST_THE_END])
def test_a_place_past_the_end_is_refused(checkpoint: Checkpoint, case: str) -> None:
    name = spoil(checkpoint, case)
    place = checkpoint.place(name)
    ends = place.offset + place.length < 2**63
    checkpoint.assert_stopped(
        case, CheckpointError, ls=1 if ends else 2, unchanged=False, says=f"{name}: "
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.torture
def test_what_stock_does(checkpoint: Checkpoint, case: str) -> None:
    spoil(checkpoint, case)
    checkpoint.note_stock(case)


@pytest.mark.parametrize("what", [3, None, {"relative_path": "__0_0.distcp"}])
def test_something_else_in_the_place_of_a_place_is_refused(
    checkpoint: Checkpoint, what: Any
) -> None:
    checkpoint.put(what, "weight")
    checkpoint.publish()
    checkpoint.assert_stopped("a place of another type", Corrupt, says="weight: ")


def test_a_place_without_an_offset_is_refused(checkpoint: Checkpoint) -> None:
    del checkpoint.place("weight").offset
    checkpoint.publish()
    checkpoint.assert_stopped("a place without an offset", Corrupt, says="weight: ")
