"""The metadata has impossible locations of data.

The attacker hopes for an overflow in a sum, for a read outside of the file, or for an allocation of
a length that the file does not have. Each number must be rejected with the name of its item, before
a file is opened or memory allocated.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.attacks.support import Checkpoint
from torch_ckpt import CheckpointError, Corrupt

#: Not a number of bytes: rejected when the metadata is read.
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

#: Past the end of the file: rejected when the file is opened; if the end overflows, when the
#: metadata is read.
PAST_THE_END = {"2**40": 2**40, "2**62": 2**62, "2**63 - 1": 2**63 - 1}

CASES = {
    f"{field} of {what}": (field, value)
    for field, (what, value) in itertools.product(
        ("offset", "length"), (IMPOSSIBLE | PAST_THE_END).items()
    )
}


def modify(c: Checkpoint, case: str) -> str:
    """Changes the location of the last item in the file. Returns the name of the item."""
    c.save_with_torch()
    field, value = CASES[case]
    index, location = max(c.metadata.storage_data.items(), key=lambda item: item[1].offset)
    setattr(location, field, value)
    c.publish()
    return str(index.fqn)


@pytest.mark.parametrize("case", [c for c in CASES if c.split(" of ")[1] in IMPOSSIBLE])
def test_an_impossible_number_is_rejected(checkpoint: Checkpoint, case: str) -> None:
    name = modify(checkpoint, case)
    checkpoint.assert_stopped(
        case, Corrupt, message=f"{name}: the metadata has an invalid location"
    )


@pytest.mark.parametrize("case", [c for c in CASES if c.split(" of ")[1] in PAST_THE_END])
def test_a_location_past_the_end_is_rejected(checkpoint: Checkpoint, case: str) -> None:
    name = modify(checkpoint, case)
    location = checkpoint.location(name)
    ends = location.offset + location.length < 2**63
    checkpoint.assert_stopped(
        case, CheckpointError, ls=1 if ends else 2, unchanged=False, message=f"{name}: "
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.torture
def test_the_outcome_of_stock_torch_is_recorded(checkpoint: Checkpoint, case: str) -> None:
    modify(checkpoint, case)
    checkpoint.record_stock(case)


@pytest.mark.parametrize("what", [3, None, {"relative_path": "__0_0.distcp"}])
def test_a_location_of_another_type_is_rejected(checkpoint: Checkpoint, what: Any) -> None:
    checkpoint.set_location(what, "weight")
    checkpoint.publish()
    checkpoint.assert_stopped("a location of another type", Corrupt, message="weight: ")


def test_a_location_without_an_offset_is_rejected(checkpoint: Checkpoint) -> None:
    del checkpoint.location("weight").offset
    checkpoint.publish()
    checkpoint.assert_stopped("a location without an offset", Corrupt, message="weight: ")
