"""torch_ckpt.state.states: schedulers, plain values, and tensors among them."""

from __future__ import annotations

import copy
import enum
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import lr_scheduler

import torch_ckpt
from tests.programs import State, kept, restore, save
from tests.support import assert_equal, cause_of, stock_load, stock_save
from torch_ckpt import CheckpointError, LoadMismatch, LoadReport
from torch_ckpt.state.states import States

pytestmark = pytest.mark.filterwarnings("error", "ignore:torch.distributed is disabled")


def _schedulers(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    s = lr_scheduler
    return {
        "LambdaLR": s.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
        "MultiplicativeLR": s.MultiplicativeLR(optimizer, lambda epoch: 0.9),
        "MultiStepLR": s.MultiStepLR(optimizer, [2, 5]),
        "CosineAnnealingLR": s.CosineAnnealingLR(optimizer, 10),
        "CosineAnnealingWarmRestarts": s.CosineAnnealingWarmRestarts(optimizer, 3),
        "CyclicLR": s.CyclicLR(optimizer, 0.1, 0.2),
        "OneCycleLR": s.OneCycleLR(optimizer, 0.1, 100),
        "PolynomialLR": s.PolynomialLR(optimizer),
        "ReduceLROnPlateau": s.ReduceLROnPlateau(optimizer),
        "SequentialLR": s.SequentialLR(
            optimizer, [s.LinearLR(optimizer), s.ExponentialLR(optimizer, 0.9)], [4]
        ),
        "ChainedScheduler": s.ChainedScheduler([s.LinearLR(optimizer), s.ConstantLR(optimizer)]),
    }


def _scheduled(name: str, steps: int) -> State:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    scheduler = _schedulers(optimizer)[name]
    for _ in range(steps):
        optimizer.step()
        scheduler.step(*((1.0,) if name == "ReduceLROnPlateau" else ()))
    return {"scheduler": scheduler}


@pytest.mark.parametrize(
    "name", _schedulers(torch.optim.SGD([nn.Parameter(torch.ones(2))], momentum=0.9))
)
def test_schedulers_load_without_allow_pickle(tmp_path: Path, name: str) -> None:
    state = _scheduled(name, 5)
    restored = kept(state, tmp_path, _scheduled(name, 0))
    assert_equal(restored["scheduler"].state_dict(), state["scheduler"].state_dict())


def test_a_scheduler_can_change_its_milestones(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    saved, other = (lr_scheduler.MultiStepLR(optimizer, steps) for steps in ([2, 5], [7]))
    kept({"scheduler": saved}, tmp_path, {"scheduler": other})
    assert other.milestones == Counter([2, 5])


def test_a_grad_scaler_is_restored(tmp_path: Path) -> None:
    saved = torch.amp.GradScaler("cpu", init_scale=64.0)
    restored = torch.amp.GradScaler("cpu")
    kept({"scaler": saved}, tmp_path, {"scaler": restored})
    assert restored.state_dict() == saved.state_dict()


class _Averages:
    """Stateful with a state of tensors and other values."""

    def __init__(self, value: float) -> None:
        self.tensors = [torch.full((3,), value), torch.full((2,), value)]
        self.count = value

    def state_dict(self) -> State:
        return {"tensors": self.tensors, "count": self.count, "nested": {"first": self.tensors[0]}}

    def load_state_dict(self, state: State) -> None:
        self.tensors, self.count = state["tensors"], state["count"]


def test_tensors_of_a_stateful_are_filled_in_place(tmp_path: Path) -> None:
    restored = _Averages(0.0)
    tensors = list(restored.tensors)
    kept({"averages": _Averages(2.0)}, tmp_path, {"averages": restored})
    assert restored.count == 2.0
    assert_equal(tensors, _Averages(2.0).tensors)
    assert restored.tensors[0].data_ptr() == tensors[0].data_ptr()


def mismatch(state: State, path: Path) -> LoadReport:
    with pytest.raises(CheckpointException) as caught:
        restore(state, path)
    error = cause_of(caught.value)
    assert isinstance(error, LoadMismatch)
    return error.report


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_stateful_gets_the_saved_number_of_tensors(tmp_path: Path, count: int) -> None:
    restored = _Averages(0.0)
    restored.tensors = [*restored.tensors, torch.ones(4)][:count] or [torch.ones(4)]
    first = restored.tensors[0]
    kept({"averages": _Averages(2.0)}, tmp_path, {"averages": restored})
    assert_equal(restored.tensors, _Averages(2.0).tensors)
    assert (restored.tensors[0] is first) == (count > 0)


class _Noise:
    """Stateful whose state is a tensor."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize("current", [torch.zeros(3), torch.zeros(2), None])
def test_a_stateful_whose_state_is_a_tensor_is_restored(tmp_path: Path, current: Any) -> None:
    restored = kept({"noise": _Noise(torch.ones(3))}, tmp_path, {"noise": _Noise(current)})
    assert_equal(restored["noise"].state, torch.ones(3))


PLAIN: list[Any] = [
    *(3, 0.1, True, None, "text", b"bytes", 1 + 2j),
    *([1, "two", [3.0]], (1, (2, 3)), {"a": {"b": 1}, 2: "two"}, {}, [], {1, 2}),
    *(OrderedDict(b=1, a=2), Counter("abc"), deque([1, 2], 5)),
    *(torch.float16, torch.Size([2, 3])),
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_are_replaced_in_the_mapping(tmp_path: Path, value: Any) -> None:
    fresh = type(value)() if isinstance(value, int | list | dict) else value
    if type(value) is dict:
        fresh = dict.fromkeys(value)
    restored = kept({"value": value}, tmp_path, {"value": fresh})["value"]
    assert restored == value
    assert type(restored) is type(value)


@pytest.mark.parametrize(
    ("saved", "fresh"),
    [([1, 2], None), (None, [1, 2]), ({"a": 1}, 0), (0.5, {}), ((1, 2), "text"), ([], {"a": 1})],
    ids=repr,
)
def test_a_plain_value_can_change_its_type(tmp_path: Path, saved: Any, fresh: Any) -> None:
    restored = kept(
        {"best": saved, "other": {"a": 1}}, tmp_path, {"best": fresh, "other": {"a": 0}}
    )
    assert restored == {"best": saved, "other": {"a": 1}}


@pytest.mark.parametrize("fresh", [0, [1]])
def test_a_plain_value_that_is_not_loaded_is_unchanged(tmp_path: Path, fresh: Any) -> None:
    save({"best": 5, "other": 6}, tmp_path)
    state = {"best": fresh, "other": 7}
    restore(state, tmp_path, names=["other"])
    assert state == {"best": fresh, "other": 6}


def test_a_plain_value_that_the_checkpoint_lacks_is_missing(tmp_path: Path) -> None:
    save({"best": 5}, tmp_path)
    state: State = {"best": 0, "number": 0, "list": []}
    assert mismatch(state, tmp_path).missing == ["number", "list"]


@pytest.mark.parametrize("saves", [save, stock_save])
def test_the_type_of_a_dict_is_kept_if_only_its_values_are_stored(
    tmp_path: Path, saves: Callable[..., Any]
) -> None:
    saves({"counts": {"seen": Counter(a=1)}}, tmp_path)
    state: State = {"counts": {"seen": Counter(a=5)}}
    restore(state, tmp_path)
    assert state == {"counts": {"seen": Counter(a=1)}}
    assert type(state["counts"]["seen"]) is Counter


@pytest.mark.parametrize("saved", [np.float64(0.5), np.float32(0.5), np.int64(3), np.bool_(True)])
def test_a_numpy_number_is_restored_as_by_stock(tmp_path: Path, saved: Any) -> None:
    restored = kept({"best": saved}, tmp_path, {"best": float("inf")})["best"]
    assert restored == saved
    assert type(restored) is type(saved)


def test_keys_with_the_same_text_are_refused(tmp_path: Path) -> None:
    ema = {1: torch.zeros(2), "1": torch.ones(2)}
    with pytest.raises(CheckpointError, match=r"ema: .*two keys with the same text"):
        save({"ema": _Noise(ema)}, tmp_path)
    with pytest.raises(ValueError, match=r"ema\.1"):
        save({"ema": ema}, tmp_path)


@pytest.mark.parametrize("saves", [save, stock_save])
def test_new_keys_of_a_dict_of_integers_are_integers(
    tmp_path: Path, saves: Callable[..., Any]
) -> None:
    losses = {0: 0.5, 1: 0.25, -2: {"a": 1}}
    saves({"losses": losses, "nested": {"of": losses}}, tmp_path)
    state = {"losses": {0: 0.0}, "nested": {"of": {-2: {}}}}
    restore(state, tmp_path)
    assert state == {"losses": losses, "nested": {"of": losses}}


@pytest.mark.parametrize("saves", [save, stock_save])
def test_new_keys_that_may_have_been_integers_are_named(
    tmp_path: Path, saves: Callable[..., Any]
) -> None:
    saves({"losses": {0: 0.5, "1": 0.25, "01": 3}}, tmp_path)
    state: State = {"losses": {}}
    with pytest.warns(UserWarning, match=r"losses\.0, losses\.1: new keys .* restored as texts"):
        restore(state, tmp_path)
    assert state == {"losses": {"0": 0.5, "1": 0.25, "01": 3}}


@pytest.mark.parametrize("saves", [save, stock_save])
def test_dicts_without_values_are_not_stored_and_stay(
    tmp_path: Path, saves: Callable[..., Any]
) -> None:
    saves({"empty": {}, "nested": {"a": {}, "b": 1}, "list": [{}, torch.ones(2)]}, tmp_path)
    state: State = {"empty": {}, "nested": {"a": {}, "b": 0}, "list": None}
    restore(state, tmp_path)
    expected = {"empty": {}, "nested": {"b": 1, "a": {}}, "list": [{}, torch.ones(2)]}
    assert_equal(state, expected)


@pytest.mark.parametrize("saves", [save, stock_save])
def test_a_dict_with_the_keys_of_ranks_is_no_per_rank_value(
    tmp_path: Path, saves: Callable[..., Any]
) -> None:
    saves({"own": {"rank0": 5, "rank1": 6}, "object": SimpleNamespace(a=1)}, tmp_path)
    state: State = {"own": {}, "object": None}
    restore(state, tmp_path, options=torch_ckpt.ReadOptions(allow_pickle=True))
    assert state == {"own": {"rank0": 5, "rank1": 6}, "object": SimpleNamespace(a=1)}


class _Elsewhere(torch.Tensor):
    """Stands for a tensor on a device."""

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


class _Pair(NamedTuple):
    number: int
    tensor: torch.Tensor


@pytest.mark.parametrize(
    ("make", "of"),
    [
        (lambda tensor: (1, tensor), lambda value: value[1]),
        (lambda tensor: _Pair(1, tensor), lambda value: value.tensor),
        (lambda tensor: defaultdict(int, a=tensor), lambda value: value["a"]),
        (lambda tensor: Counter({"a": tensor}), lambda value: value["a"]),
    ],
    ids=["tuple", "named tuple", "defaultdict", "Counter"],
)
def test_tensors_in_objects_are_stored_on_the_cpu(
    make: Callable[[Any], Any], of: Callable[[Any], Any]
) -> None:
    value = make(torch.ones(2).as_subclass(_Elsewhere))
    with torch.serialization.safe_globals([_Pair]):
        [stored] = States({"value": _Noise([value])}).saved()["value"]["_objects"].value
    assert type(of(stored)) is torch.Tensor
    assert type(stored) is type(value)
    assert type(of(value)) is _Elsewhere


def test_attributes_of_an_ordered_dict_in_an_object_are_not_stored() -> None:
    value = OrderedDict(a=1)
    vars(value)["hook"] = lambda: None
    stored = States({"value": _Noise([(value,)])}).saved()["value"]["_objects"].value
    assert stored == [(value,)]
    assert vars(stored[0][0]) == {}


def test_arrays_are_restored(tmp_path: Path) -> None:
    restored = kept({"value": [np.arange(3)]}, tmp_path, {"value": [0]})
    assert restored["value"][0].tolist() == [0, 1, 2]


def test_tensors_are_filled_in_place(tmp_path: Path) -> None:
    tensors = [torch.zeros(2), torch.zeros(3), torch.zeros(4)]
    tensors.append(torch.zeros(3, requires_grad=True))
    saved = {"ema": {1: torch.ones(2), "l": [5, torch.ones(3)], "o": OrderedDict(a=torch.ones(4))}}
    fresh = {"ema": {1: tensors[0], "l": [0, tensors[1]], "o": OrderedDict(a=tensors[2])}}
    restored = kept({**saved, "w": torch.ones(3)}, tmp_path, {**fresh, "w": tensors[3]})
    ema = restored["ema"]
    assert_equal(ema, saved["ema"])
    assert_equal(restored["w"].detach(), torch.ones(3))
    for found, tensor in zip(
        (ema[1], ema["l"][1], ema["o"]["a"], restored["w"]), tensors, strict=True
    ):
        assert found is tensor


@pytest.mark.parametrize("saves", [save, stock_save])
@pytest.mark.parametrize("stored", [None, 5, torch.ones(2), {"inner": None}], ids=repr)
@pytest.mark.parametrize("top", ["e", "inner", "outer"])
def test_a_tensor_that_another_value_replaces_is_named(
    tmp_path: Path, saves: Callable[..., Any], stored: Any, top: str
) -> None:
    own: Any = torch.zeros(2)
    if top != "e":
        own = {"inner": {"a": own}} if top == "inner" else {"inner": own}
    name = {"e": "e", "inner": "e.inner.a", "outer": "e.inner"}[top]
    saves({"e": stored}, tmp_path)
    state: State = {"e": own}
    if isinstance(stored, torch.Tensor) and isinstance(own, torch.Tensor):
        restore(state, tmp_path)
    else:
        with pytest.warns(UserWarning, match=rf"^{name}: .*has replaced the tensor"):
            restore(state, tmp_path)
    assert_equal(state["e"], stored)


def test_a_tensor_that_a_dict_with_tensors_replaces_is_named(tmp_path: Path) -> None:
    save({"e": {"x": torch.ones(2)}}, tmp_path)
    state: State = {"e": torch.zeros(2)}
    with pytest.warns(UserWarning, match=r"^e: .*has replaced the tensor"):
        restore(state, tmp_path)
    assert_equal(state["e"], {"x": torch.ones(2)})


def test_a_list_with_more_tensors_than_were_saved_is_shortened(tmp_path: Path) -> None:
    fresh: State = {"losses": [torch.zeros(2), torch.zeros(3)]}
    assert_equal(kept({"losses": [torch.ones(2)]}, tmp_path, fresh), {"losses": [torch.ones(2)]})


@pytest.mark.parametrize("saves", [save, stock_save])
@pytest.mark.parametrize(
    ("saved", "own"),
    [
        ({"a": torch.ones(1), "b": torch.ones(2)}, {}),
        ({"n": 1, "b": torch.ones(2), "m": 2}, {"n": 0, "m": 0}),
        ({"n": 1, "d": {"b": torch.ones(2)}}, {"n": 0}),
        ({"n": 1, "d": {"b": torch.ones(2)}}, {"n": 0, "d": {}}),
        ({"n": 1, "d": {"b": torch.ones(2), "c": None}}, {"n": 0, "d": {"c": None}}),
        ({"n": 1, 3: {4.5: torch.ones(2)}}, {"n": 0, 3: {5: torch.zeros(1)}}),
        ({"n": 1, "l": [{"x.y": torch.ones(2), "k": 2}]}, {"n": 0, "l": [{"k": 0}]}),
    ],
    ids=["flat", "between", "in a dict", "in an empty dict", "with None", "numbers", "in a list"],
)
def test_new_tensors_of_a_dict_are_refused_before_anything_changes(
    tmp_path: Path, saves: Callable[..., Any], saved: State, own: State
) -> None:
    saves({"c": {**saved, "a": torch.ones(1)}, "other": torch.ones(2)}, tmp_path)
    state: State = {"c": {**copy.deepcopy(own), "a": torch.zeros(1)}, "other": torch.zeros(2)}
    with pytest.raises(CheckpointException, match="wanted no new tensor in this dict"):
        restore(state, tmp_path)
    assert_equal(state, {"c": {**own, "a": torch.zeros(1)}, "other": torch.zeros(2)})
    with pytest.warns(UserWarning, match=r"skipped because of strict=False: c\..*no new tensor"):
        restore(state, tmp_path, strict=False)
    kept = {**_with(own, n=1, m=2, k=2), "a": torch.ones(1)}
    found = {key: state["c"][key] for key in kept}
    assert_equal(found, kept)
    assert len(state["c"]) == len(kept)


def _with(own: Any, **numbers: int) -> Any:
    """Returns a copy of a state with other numbers."""
    if isinstance(own, dict):
        return {
            key: numbers[key] if type(part) is int else _with(part, **numbers)
            for key, part in own.items()
        }
    return [_with(part, **numbers) for part in own] if isinstance(own, list) else own


def test_tensors_of_a_dict_that_names_omit_need_not_be_new(tmp_path: Path) -> None:
    save({"c": {"a": torch.ones(1), "b": torch.ones(2), "n": 1}}, tmp_path)
    state: State = {"c": {"a": torch.zeros(1), "n": 0}}
    restore(state, tmp_path, names=["c.a", "c.n"])
    assert_equal(state, {"c": {"a": torch.ones(1), "n": 1}})


@pytest.mark.parametrize("saves", [save, stock_save])
def test_tensors_that_the_checkpoint_lacks_are_unchanged_if_the_load_is_not_strict(
    tmp_path: Path, saves: Callable[..., Any]
) -> None:
    saves({"c": {"a": torch.ones(1), "n": 3}}, tmp_path)
    extra = torch.zeros(2)
    state: State = {"c": {"a": torch.zeros(1), "b": extra, "d": {1: extra}, "n": 0}}
    assert mismatch(state, tmp_path).missing == ["c.b", "c.d.1"]
    with pytest.warns(UserWarning, match=r"skipped because of strict=False: c\.b .*, c\.d\.1"):
        restore(state, tmp_path, strict=False)
    assert_equal(
        {key: state["c"][key] for key in ("a", "n", "b", "d")},
        {"a": torch.ones(1), "n": 3, "b": extra, "d": {1: extra}},
    )
    assert state["c"]["b"] is state["c"]["d"][1] is extra


def test_names_that_omit_a_tensor_of_an_object_are_refused_before_anything_changes(
    tmp_path: Path,
) -> None:
    save({"c": _Noise([torch.ones(1), torch.ones(2), 5]), "other": torch.ones(2)}, tmp_path)
    state: State = {"c": _Noise([torch.zeros(1)]), "other": torch.zeros(2)}
    with pytest.raises(CheckpointException, match=r"c: names= omits c\.1, and the state has no"):
        restore(state, tmp_path, names=["other", "c._objects", "c.0"])
    assert_equal(state["other"], torch.zeros(2))


@pytest.mark.parametrize("saves", [save, stock_save])
@pytest.mark.parametrize(
    ("saved", "own"),
    [
        ({"x": torch.ones(2)}, {}),
        ([torch.ones(2), torch.ones(3)], []),
        ({"a": {"b": [torch.ones(2), {"c": torch.ones(1)}]}}, None),
        ({"a.b": torch.ones(2)}, {}),
    ],
    ids=["dict", "list", "nested", "dots"],
)
def test_the_structure_of_a_state_is_restored(
    tmp_path: Path, saves: Callable[..., Any], saved: Any, own: Any
) -> None:
    saves({"a": _Noise(saved)}, tmp_path / "step")
    state = {"a": _Noise(own)}
    torch_ckpt.load(state, tmp_path / "step")
    assert_equal(state["a"].state, saved)


# --- tensors that share memory -------------------------------------------------------------------


def _views() -> dict[str, list[torch.Tensor]]:
    base = torch.zeros(4, 6)
    flat = base.view(-1)
    return {
        "shifted": [flat[0:3], flat[1:4]],
        "same": [flat[0:3], flat[0:3]],
        "within": [flat[0:9], flat[2:4], flat[8:9]],
        "row and column": [base[1], base[:, 2]],
        "bytes": [flat[:2], flat.view(torch.uint8)[7:9]],
        "expanded": [torch.zeros(1).expand(3)],
        "windows": [flat.unfold(0, 3, 2)],
    }


@pytest.mark.parametrize("saves", [save, stock_save])
@pytest.mark.parametrize("name", _views())
def test_tensors_that_share_memory_get_the_values_that_were_saved(
    tmp_path: Path, saves: Callable[..., Any], name: str
) -> None:
    saved = [
        torch.arange(tensor.numel()).view(tensor.shape).to(tensor.dtype) + 10 * number
        for number, tensor in enumerate(_views()[name])
    ]
    saves({"views": _Noise(saved)}, tmp_path)
    state = {"views": _Noise(_views()[name])}
    restore(state, tmp_path)
    assert_equal(state["views"].state, saved)


def test_tensors_with_disjoint_elements_of_one_storage_are_filled_in_place(tmp_path: Path) -> None:
    base = torch.zeros(6, 20)
    own = [base[:4, :8], base[:4, 8:16], base[:, 16], base[:, 17], base[4:, 3:9], base[5, :2]]
    saved = [torch.full_like(tensor, number + 1) for number, tensor in enumerate(own)]
    save({"views": _Noise(saved)}, tmp_path)
    state = {"views": _Noise(own)}
    restore(state, tmp_path)
    assert_equal(state["views"].state, saved)
    assert all(a is b for a, b in zip(state["views"].state, own, strict=True))


def test_an_expanded_tensor_of_a_dict_is_refused_by_name(tmp_path: Path) -> None:
    save({"c": {"a": torch.arange(3.0)}, "other": torch.ones(2)}, tmp_path)
    state: State = {"c": {"a": torch.zeros(1).expand(3)}, "other": torch.zeros(2)}
    with pytest.raises(CheckpointException, match=r"c\.a: elements of the tensor share memory"):
        restore(state, tmp_path)
    assert_equal(state["other"], torch.zeros(2))


@pytest.mark.parametrize(
    ("stored", "own", "is_in_place"),
    [
        (torch.int64, torch.int32, False),
        (torch.float64, torch.float32, False),
        (torch.float32, torch.bfloat16, False),
        (torch.int32, torch.int64, True),
        (torch.bfloat16, torch.float32, True),
    ],
    ids=str,
)
def test_a_stateful_gets_a_new_tensor_if_its_own_would_lose_precision(
    tmp_path: Path, stored: torch.dtype, own: torch.dtype, is_in_place: bool
) -> None:
    saved = torch.tensor([2.0**30 + (not is_in_place)], dtype=torch.float64).to(stored)
    save({"noise": _Noise(saved)}, tmp_path)
    tensor = torch.zeros(1, dtype=own)
    state = {"noise": _Noise(tensor)}
    if is_in_place:
        stock: State = {"noise": torch.zeros(1, dtype=own)}
        stock_load(stock, tmp_path)
        restore(state, tmp_path)
        assert state["noise"].state is tensor
        assert_equal(tensor, stock["noise"])
    else:
        restore(state, tmp_path)
        assert_equal(state["noise"].state, saved)


class _OfThisTest:
    """Has a unique name: a warning is given once in a process for each name and class."""


class _Phase(enum.IntEnum):
    WARM_UP = 1


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"config": [_OfThisTest()]}, r"config\.0: .*_OfThisTest.*add_safe_globals"),
        ({"phase": _Phase.WARM_UP}, r"phase: .*_Phase.*add_safe_globals"),
    ],
    ids=["object", "number of a subclass"],
)
def test_a_value_that_cannot_be_loaded_is_named_at_the_save(
    tmp_path: Path, state: State, text: str
) -> None:
    with pytest.warns(UserWarning, match=text):
        save(state, tmp_path)


def test_a_later_value_that_cannot_be_loaded_is_named_once(tmp_path: Path) -> None:
    config: State = {"nested": [{"a": 1}]}
    save({"config": config}, tmp_path)
    config["nested"][0]["a"] = _OfThisTest()
    with pytest.warns(UserWarning, match=r"config\.nested\.0\.a: .*_OfThisTest"):
        save({"config": config}, tmp_path)
    save({"config": config}, tmp_path)


def test_the_manager_refuses_names_that_are_not_strings(tmp_path: Path) -> None:
    state: Any = {1: 2}
    with torch_ckpt.CheckpointManager(tmp_path) as manager:
        for step in (0, 1):  # no save is due, and one is
            with pytest.raises(TypeError, match="must be str, got 1"):
                manager.save(step, state, force=bool(step))
        with pytest.raises(TypeError, match="must be str, got 1"):
            manager.restore(state)


def test_a_state_that_cannot_be_read_is_named() -> None:
    class Broken:
        def state_dict(self) -> State:
            raise RuntimeError("the worker has died")

        def load_state_dict(self, state: State) -> None: ...

    with pytest.raises(CheckpointError, match=r"^loader: .* on rank 0: the worker has died"):
        States({"loader": Broken()}).saved()
