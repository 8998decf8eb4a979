"""Comparison of replicated tensors by checksums during a save."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from torch_ckpt import _core
from torch_ckpt.saving.replica_check import fingerprint_of
from torch_ckpt.saving.save_state import SaveState


def fingerprints_of(value: torch.Tensor, mode: str = "warn") -> bytes:
    """Returns the fingerprint of a tensor."""
    return SaveState({"value": value}).fingerprints(mode)


def differing(*values: Any, unknown: int | None = None) -> list[tuple[str, list[list[int]]]]:
    """Compares values that ranks save under one name.

    Args:
        values: None for a rank that has no such value.
        unknown: a rank that sends no fingerprints.
    """
    states = [SaveState({} if value is None else {"a": value}) for value in values]
    coordinator = _core.SaveCoordinator()
    messages = []
    for rank, state in enumerate(states):
        state.plan()
        fingerprints = None if rank == unknown else state.fingerprints("warn")
        messages.append(_core.RankPlan().message(state.structure, fingerprints))
    coordinator.assign(messages)
    return coordinator.differing_replicas()


@pytest.mark.parametrize("mode", ["warn", "error"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128, torch.uint8])
@pytest.mark.parametrize("shape", [(), (3, 5), (700, 900)])
def test_the_checksum_is_independent_of_the_memory_layout(
    mode: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = (torch.rand(shape) * 100).to(dtype)
    other = tensor.mT.contiguous().mT if tensor.dim() else tensor
    apart = torch.zeros((*shape, 2), dtype=dtype)[..., 0].copy_(tensor)
    sums = [fingerprints_of(t, mode) for t in (tensor, other, apart)]
    assert sums[0] == sums[1] == sums[2] != bytes(4)


@pytest.mark.parametrize("mode", ["warn", "error"])
def test_a_single_element_has_the_same_checksum_with_any_stride(mode: str) -> None:
    element = torch.arange(3.0)[1::2]
    assert element.stride() == (2,)
    assert fingerprints_of(element, mode) == fingerprints_of(torch.tensor([1.0]), mode)


def test_the_first_and_the_last_item_of_a_large_tensor_are_checked() -> None:
    before = fingerprints_of(torch.zeros(1_000_003))
    for place in (0, -1):
        changed = torch.zeros(1_000_003)
        changed[place] = 1
        assert fingerprints_of(changed) != before


def test_the_groups_of_ranks_with_equal_values_are_found() -> None:
    zero, one = torch.zeros(1), torch.ones(1)
    assert differing(zero, zero, zero) == []
    assert differing(one, one, None, zero, one) == [("a", [[0, 1, 4], [3]])]
    assert differing(1, None, 2) == [("a", [[0], [2]])]


def test_a_rank_without_fingerprints_is_not_compared() -> None:
    assert differing(torch.zeros(1), torch.ones(1), unknown=1) == []


class Own:
    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


#: Pairs of equal objects that were built differently.
EQUAL: list[tuple[Any, Any]] = [
    (["ab", "ab"], ["ab", "".join(["a", "b"])]),
    # Their hashes collide, so a set lists them in the order of insertion.
    ({0, 8}, {8, 0}),
    (Own(x=1, y={"z"}), Own(x=1, y={"z"})),
    ({"t": torch.arange(6.0)}, {"t": torch.arange(12.0)[:6]}),
    (numpy.arange(3), numpy.arange(6)[:3].copy()),
    (10**5000, 10**5000),
]


@pytest.mark.parametrize(("one", "other"), EQUAL, ids=lambda value: type(value).__name__)
def test_equal_objects_have_the_same_checksum(one: Any, other: Any) -> None:
    assert fingerprint_of(one) == fingerprint_of(other)


def test_different_objects_have_different_checksums() -> None:
    objects: list[Any] = [
        *(0, 1, True, 1.0, "1", b"1", None, [1], (1,), {1}, {"a": 1}, {"a": 2}),
        *(Own(x=1), Own(x=2), {"t": torch.zeros(2)}, {"t": torch.ones(2)}),
        {"t": torch.zeros(2, dtype=torch.int32)},
    ]
    assert len({fingerprint_of(value) for value in objects}) == len(objects)


def test_an_object_that_contains_itself_is_not_compared() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    assert fingerprint_of(cycle) == 0


def test_an_object_that_cannot_be_pickled_is_not_compared() -> None:
    assert differing(lambda: 0, 1) == []
