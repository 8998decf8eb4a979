"""State dicts flattened to items as torch flattens them."""

from __future__ import annotations

from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from torch_ckpt import _C
from torch_ckpt.checkpoint.chunks import local_chunks

KEYS = st.one_of(st.text("ab.", max_size=2), st.integers(0, 3))
LEAVES = st.sampled_from(
    [torch.zeros(2), torch.nn.Parameter(torch.zeros(1)), 3, "text", None, b"bytes", (), []]
)


def containers(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts, lists = st.dictionaries(KEYS, parts, max_size=3), st.lists(parts, max_size=3)
    return st.one_of(
        dicts, dicts.map(OrderedDict), dicts.map(MappingProxyType), lists, lists.map(tuple)
    )


STATES = st.dictionaries(KEYS, st.recursive(LEAVES, containers, max_leaves=12), max_size=4)


@given(STATES)
def test_names_paths_and_values_equal_those_of_torch(state: dict[Any, Any]) -> None:
    try:
        flat, paths = flatten_state_dict(state)
    except ValueError as error:
        with pytest.raises(ValueError, match=str(error)):
            _C.FlatState(state, local_chunks)
        return
    rows = _C.FlatState(state, local_chunks)
    assert rows.names() == list(flat)
    for number, (name, value) in enumerate(flat.items()):
        assert rows.value(number) is value
        assert rows.path(number) == paths[name]


def test_names_can_have_surrogates() -> None:
    rows = _C.FlatState({"\udc80": {"\ud800": 1}}, local_chunks)
    assert rows.names() == ["\udc80.\ud800"]


def test_an_exception_of_a_key_is_raised() -> None:
    class Key:
        def __str__(self) -> str:
            raise KeyError("no text")

    with pytest.raises(KeyError, match="no text"):
        _C.FlatState({"a": {Key(): 1}}, local_chunks)


def test_a_state_dict_that_contains_itself_is_refused() -> None:
    state: dict[str, Any] = {}
    state["self"] = state
    with pytest.raises(RecursionError):
        _C.FlatState(state, local_chunks)


def test_a_removed_value_can_be_replaced_by_another_of_its_name() -> None:
    rows = _C.FlatState({"a": 1, "b": torch.zeros(2)}, local_chunks)
    with pytest.raises(ValueError, match="duplicated flatten key a"):
        rows.add("a", ("a",), 2)
    rows.remove(0)
    assert rows.objects() == []
    rows.add("a", ("a",), 2)
    assert rows.value(0) == 2
    assert rows.objects() == [0]


def test_indexes_of_absent_items_and_reads_are_refused() -> None:
    rows = _C.FlatState({}, local_chunks)
    for use in (rows.name, rows.value, rows.path, rows.remove):
        with pytest.raises(IndexError):
            use(0)
    reads = _C.TensorReads()
    with pytest.raises(IndexError, match="there is no read of this number"):
        reads[0]
    assert list(reads) == []
