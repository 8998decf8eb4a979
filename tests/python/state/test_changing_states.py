"""States whose structure changes between the save and the restore in a new process."""

from __future__ import annotations

import copy
import io
import random
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import torch_ckpt
from tests.programs import State, restore
from tests.support import assert_equal, stock_load, stock_save
from torch_ckpt import PerRank

pytestmark = pytest.mark.filterwarnings("error", "ignore:torch.distributed is disabled")


class Tracker:
    """Stateful whose state is its value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


def pickled(value: Any) -> Any:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


# --- random states -------------------------------------------------------------------------------

# A tensor of another dtype of the same kind is filled in place, as by stock, which converts values.
_DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64)
_KEYS = ("loss", "history", "best", "buffer", "a.b", "a.b.c")
# Stock restores neither keys that are numbers, nor Counters, nor empty dicts in lists.
_ALL_KEYS = (*_KEYS, 0, 1, 7)

# Tests draw states of this many keys into one checkpoint, to save and load them by one call.
_STATES = 500


class _Draw(random.Random):
    """Draws the parts of random states.

    Args:
        keys: the keys of dicts.
        others: leaves that are neither tensors nor lists.
        least: smallest number of parts of a dict or list of other values.
    """

    def __init__(self, keys: Sequence[Any], others: Sequence[Any], least: int) -> None:
        super().__init__(5)
        self.keys = keys
        self.others = others
        self.least = least

    def tensor(self) -> torch.Tensor:
        shape = [self.randrange(4) for _ in range(self.randrange(3))]
        values = torch.arange(9)[: torch.Size(shape).numel()] + self.randrange(1 << 20)
        return values.reshape(shape).to(self.choice(_DTYPES))

    def leaf(self) -> Any:
        kind = self.randrange(5)
        if kind < 2:
            return self.tensor()
        if kind == 2:
            return [self.randrange(9) for _ in range(self.randrange(4))]
        return (1, self.tensor()) if kind == 3 else copy.deepcopy(self.choice(self.others))

    def state(self, depth: int = 3) -> Any:
        if depth == 0 or self.random() < 0.3:
            return self.leaf()
        parts = [self.state(depth - 1) for _ in range(self.randrange(self.least, 4))]
        if self.random() < 0.4:
            return parts
        kind = self.choice([dict, dict, OrderedDict])
        return kind(zip(self.sample(self.keys, len(parts)), parts, strict=True))

    def states(self) -> list[State]:
        found: list[State] = []
        while len(found) < _STATES:
            keys = self.sample(_KEYS[:4], self.randrange(1, 5))
            state = {key: self.state() for key in keys}
            if not _has_duplicate_names(state):
                found.append(state)
        return found


def _changed(draw: _Draw, state: Any) -> Any:
    """Returns a copy of a state with another structure, as in a new process."""
    if draw.random() < 0.1:
        return draw.state(1)
    if isinstance(state, torch.Tensor):
        return draw.choice([torch.zeros_like(state), torch.zeros_like(state), None, draw.tensor()])
    if type(state) is list:
        parts = [_changed(draw, part) for part in state]
        return parts[: draw.randrange(len(parts) + 1)] + [draw.leaf()] * draw.randrange(2)
    if type(state) in (dict, OrderedDict):
        kept_keys = [key for key in state if draw.random() < 0.9]
        return type(state)((key, _changed(draw, state[key])) for key in kept_keys)
    return draw.choice([copy.deepcopy(state), None, 1])


def _zeroed(state: Any) -> Any:
    """Returns a copy of a state with the same structure, whose tensors are zeros."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if type(state) in (dict, OrderedDict):
        return type(state)((key, _zeroed(part)) for key, part in state.items())
    return [_zeroed(part) for part in state] if type(state) is list else copy.deepcopy(state)


def _has_duplicate_names(state: Any) -> bool:
    names: list[str] = []

    def add(part: Any, name: str) -> None:
        if isinstance(part, dict | list):
            items = part.items() if isinstance(part, dict) else enumerate(part)
            for key, inner in items:
                add(inner, f"{name}.{key}")
        names.append(name)

    add(state, "")
    return len(set(names)) < len(names)


_OTHERS = (None, 3, 0.5, float("inf"), "text", True, (), [])


def _drawn() -> dict[str, tuple[State, Any]]:
    """Returns saved states, and states of the same objects in a new process, by key."""
    draw = _Draw(_ALL_KEYS, (*_OTHERS, {}, Counter("ab"), {1, 2}), 0)
    return {
        f"tracker{number}": (state, _changed(draw, state))
        for number, state in enumerate(draw.states())
    }


@pytest.mark.parametrize("wrap", [Tracker, lambda value: PerRank(Tracker(value))], ids=["", "rank"])
def test_random_states_are_restored_as_pickles_are_whatever_the_new_object_has(
    tmp_path: Path, wrap: Callable[[Any], Any]
) -> None:
    drawn = _drawn()
    torch_ckpt.save({key: wrap(saved) for key, (saved, _) in drawn.items()}, tmp_path)
    fresh = {key: wrap(changed) for key, (_, changed) in drawn.items()}
    torch_ckpt.load(fresh, tmp_path)
    for key, (saved, _) in drawn.items():
        found = fresh[key].value
        assert_equal(found.value if wrap is not Tracker else found, pickled(saved))


#: Stands for a dict or a list without values.
_NOTHING = "nothing"


def _leaves_of(state: Any) -> Any:
    """Returns the part of a state that DCP stores: values and the texts of keys, without the types
    of dicts. Parts without values are left out."""
    if isinstance(state, dict):
        leaves = {str(key): _leaves_of(part) for key, part in state.items()}
        return {
            key: leaves[key] for key in sorted(leaves) if leaves[key] is not _NOTHING
        } or _NOTHING
    if type(state) is not list:
        return state
    parts = [part for part in map(_leaves_of, state) if part is not _NOTHING]
    return parts if parts or not state else _NOTHING


def test_random_values_of_a_mapping_are_restored_as_by_dcp_or_refused(tmp_path: Path) -> None:
    drawn = dict([*_drawn().items()][: _STATES // 4])
    torch_ckpt.save({k: saved for k, (saved, _) in drawn.items()}, tmp_path)
    silent = warned = 0
    for key, (saved, changed) in drawn.items():
        state: State = {key: changed}
        live = _tensors(changed, with_lists=False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                restore(state, tmp_path)
            except CheckpointException:  # before any value changes
                continue
        if not any("less precision" in str(warning.message) for warning in caught):
            assert_equal(_leaves_of(state[key]), _leaves_of(pickled(saved)))
        kept = [*map(id, _tensors(state[key]))]
        is_kept = all(id(tensor) in kept for tensor in live)
        assert is_kept or any("has replaced the tensor" in str(one.message) for one in caught)
        silent += not caught
        warned += bool(caught)
    assert silent > len(drawn) // 5
    assert silent + warned > len(drawn) // 3


def test_random_states_of_the_same_structure_are_restored_as_by_stock(tmp_path: Path) -> None:
    some = _Draw(_KEYS, _OTHERS, 1).states()[: _STATES // 4]
    drawn = {f"tracker{number}": state for number, state in enumerate(some)}
    states = {key: Tracker(saved) for key, saved in drawn.items()}
    torch_ckpt.save(states, tmp_path / "ours")
    stock_save(states, tmp_path / "stock")
    ours, stock, crossed = (
        {key: Tracker(_zeroed(saved)) for key, saved in drawn.items()} for _ in range(3)
    )
    tensors = {key: [*_tensors(tracker.value)] for key, tracker in ours.items()}
    torch_ckpt.load(ours, tmp_path / "ours")
    stock_load(stock, tmp_path / "stock")
    torch_ckpt.load(crossed, tmp_path / "stock")
    for key in drawn:
        assert_equal(ours[key].value, stock[key].value)
        assert_equal(crossed[key].value, stock[key].value)
        found = [*_tensors(ours[key].value)]
        assert all(a is b for a, b in zip(found, tensors[key], strict=True))


def _tensors(state: Any, *, with_lists: bool = True) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    is_list = type(state) is list and with_lists
    parts = state.values() if isinstance(state, dict) else state if is_list else ()
    return [tensor for part in parts for tensor in _tensors(part, with_lists=with_lists)]


@pytest.mark.parametrize("saves", [torch_ckpt.save, stock_save])
def test_plain_values_that_became_tensors_or_grew_are_loaded(
    tmp_path: Path, saves: Callable[..., Any]
) -> None:
    saved = {"best": torch.tensor(0.5), "history": [torch.ones(2), torch.zeros(3)], "last": [1]}
    saves({**saved, "nested": {"best": torch.ones(3), "name": "b"}}, tmp_path)
    history = [torch.zeros(2)]
    state: State = {"best": float("inf"), "history": history, "last": []}
    state["nested"] = nested = {"best": None, "name": "a"}
    first = history[0]
    torch_ckpt.load(state, tmp_path)
    assert_equal({key: state[key] for key in saved}, saved)
    assert_equal(nested, {"best": torch.ones(3), "name": "b"})
    assert state["history"] is history
    assert history[0] is first
