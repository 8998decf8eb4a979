"""Values that cannot be saved or loaded are named by their full key when they are saved."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

import torch_ckpt
from tests.support import no_warnings


class Own:
    def __init__(self, part: Any) -> None:
        self.part = part


class OwnTensor(torch.Tensor):
    pass


Save = Callable[[dict[str, Any], Path], Any]


def by_async_save(state: dict[str, Any], path: Path) -> None:
    torch_ckpt.async_save(state, path).result()


def by_manager(state: dict[str, Any], path: Path) -> None:
    with torch_ckpt.CheckpointManager(path) as manager:
        manager.save(1, state, force=True)


each_way = pytest.mark.parametrize("save", [torch_ckpt.save, by_async_save, by_manager])


@each_way
@pytest.mark.parametrize(
    ("value", "key"),
    [
        ([1, {"lock": threading.Lock()}], "trainer.part.1.lock"),
        (Own(threading.Lock()), "trainer.part.part"),
        (lambda: None, "trainer.part"),
    ],
    ids=["in containers", "in an object", "a function"],
)
def test_an_unpicklable_value_is_named_by_its_full_key(
    tmp_path: Path, save: Save, value: Any, key: str
) -> None:
    with pytest.raises(torch_ckpt.CheckpointError, match=f"{key}: an object of type .* cannot be"):
        save({"trainer": {"part": value}, "t": torch.ones(2)}, tmp_path / "c")


@each_way
def test_a_meta_tensor_is_named_with_a_remedy(tmp_path: Path, save: Save) -> None:
    model = torch.nn.Linear(2, 2, device="meta")
    with pytest.raises(torch_ckpt.CheckpointError, match=r"model\.weight: .*to_empty"):
        save({"model": model}, tmp_path / "c")


UNSUPPORTED: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    "lazy": lambda: torch.nn.LazyLinear(3).weight,
    "int4": lambda: torch.zeros(4, dtype=torch.uint8).view(torch.int4),
}


def by_safetensors(state: dict[str, Any], path: Path) -> None:
    torch_ckpt.save(state, path, format="safetensors")


def by_async_safetensors(state: dict[str, Any], path: Path) -> None:
    torch_ckpt.async_save(state, path, format="safetensors").result()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", UNSUPPORTED)
@pytest.mark.parametrize(
    "save", [torch_ckpt.save, by_async_save, by_manager, by_safetensors, by_async_safetensors]
)
def test_a_tensor_that_cannot_be_saved_is_named_among_others(
    tmp_path: Path, save: Save, kind: str
) -> None:
    state = {"fine": {str(i): torch.ones(2) for i in range(1000)}, "culprit": UNSUPPORTED[kind]()}
    with pytest.raises(torch_ckpt.CheckpointError, match=r"culprit: "):
        save(state, tmp_path / "c")
    assert not [*tmp_path.rglob(".metadata"), *tmp_path.rglob("*.safetensors*")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", UNSUPPORTED)
@pytest.mark.parametrize("save", [torch_ckpt.save, by_async_save])
def test_a_tensor_in_an_object_is_named_if_the_object_cannot_be_saved(
    tmp_path: Path, save: Save, kind: str
) -> None:
    value = UNSUPPORTED[kind]()
    try:
        save({"fine": torch.ones(2), "part": (1, {"culprit": value})}, tmp_path / "c")
    except torch_ckpt.CheckpointError as error:
        assert "part.1.culprit: " in str(error)  # noqa: PT017
    else:
        stored: dict[str, Any] = {"part": None}
        torch_ckpt.load(stored, tmp_path / "c", options=torch_ckpt.ReadOptions(allow_pickle=True))
        assert type(stored["part"][1]["culprit"]) is type(value)


@each_way
def test_an_object_of_a_custom_class_is_warned_of_by_its_full_key(
    tmp_path: Path, save: Save
) -> None:
    kind = type("Kind", (Own,), {"__module__": __name__, "__qualname__": f"Own{save.__name__}"})
    globals()[kind.__qualname__] = kind
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save({"trainer": {"part": [2, kind(3)]}}, tmp_path / "c")
    (warning,) = [
        str(w.message)
        for w in caught
        if "an object was saved that a load will refuse" in str(w.message)
    ]
    assert "trainer.part.1: " in warning
    assert f"{__name__}.{kind.__qualname__}" in warning
    assert "add_safe_globals" in warning


def test_a_tensor_of_a_custom_class_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"a load will refuse: model\.w: this tensor subclass"):
        torch_ckpt.save({"model": {"w": torch.ones(2).as_subclass(OwnTensor)}}, tmp_path)


def test_loadable_values_are_not_warned_of(tmp_path: Path) -> None:
    state = {"a": {"list": [1, 2.0, "x"], "set": {1}, "path": Path("x"), "size": torch.Size([2])}}
    with no_warnings():
        torch_ckpt.save(state, tmp_path)


class Model(torch.nn.Linear):
    def forward(self, *_: Any) -> torch.Tensor:
        raise AssertionError("it was called")


@pytest.mark.parametrize(
    "call",
    [
        torch_ckpt.save,
        partial(torch_ckpt.save, planner=DefaultSavePlanner()),
        torch_ckpt.async_save,
        torch_ckpt.load,
    ],
    ids=["save", "save with a planner", "async_save", "load"],
)
def test_a_module_is_not_called_for_its_state(tmp_path: Path, call: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"got Model\. Pass \{'model': \.\.\.\}"):
        call(Model(2, 2), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("state", [[], lambda: []], ids=["a list", "a function of it"])
def test_a_value_that_is_not_a_state_dict_is_refused(tmp_path: Path, state: Any) -> None:
    with pytest.raises(TypeError, match="the state must be a dict, got list"):
        torch_ckpt.save(state, tmp_path)


def test_a_storage_is_saved_as_an_object(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        # The class is deprecated.
        warnings.simplefilter("ignore")
        stored = torch.arange(4.0).storage()
        torch_ckpt.save({"s": stored}, tmp_path)
        state: dict[str, Any] = {"s": torch.zeros(4).storage()}
        assert torch_ckpt.load(state, tmp_path).fits  # type: ignore[union-attr]
        assert state["s"].tolist() == stored.tolist()


# --- loads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({5: 0, "w": torch.zeros(2)}, "the keys of the state must be texts, got 5"),
        (MappingProxyType({"w": torch.zeros(2)}), "the state must be a dict, got mappingproxy"),
    ],
    ids=["a number as key", "an immutable mapping"],
)
def test_a_state_whose_values_cannot_be_replaced_is_refused_before_a_change(
    tmp_path: Path, state: Any, text: str
) -> None:
    torch_ckpt.save({"w": torch.ones(2), "5": 7}, tmp_path)
    with pytest.raises(TypeError, match=text):
        torch_ckpt.load(state, tmp_path)
    assert torch.equal(state["w"], torch.zeros(2))


@pytest.mark.parametrize("strict", ["dtype", "all"])
def test_an_unknown_strictness_is_refused(tmp_path: Path, strict: Any) -> None:
    torch_ckpt.save({"w": torch.ones(2)}, tmp_path)
    with pytest.raises(ValueError, match="strict must be"):
        torch_ckpt.load({"w": torch.zeros(2)}, tmp_path, strict=strict)


def test_checks_that_a_planner_does_not_make_are_refused(tmp_path: Path) -> None:
    state = {"w": torch.ones(2)}
    with pytest.raises(ValueError, match='check_replicas="error" is not available'):
        torch_ckpt.save(state, tmp_path, planner=DefaultSavePlanner(), check_replicas="error")
    torch_ckpt.save(state, tmp_path)
    with pytest.raises(ValueError, match=r'strict="dtypes".* do not work with a planner'):
        torch_ckpt.load(state, tmp_path, planner=DefaultLoadPlanner(), strict="dtypes")


def test_preflight_refuses_what_a_load_refuses(tmp_path: Path) -> None:
    torch_ckpt.save({"w": torch.ones(2), "o": {"lr": 0.1}}, tmp_path)
    with pytest.raises(ValueError, match=r"no name in the state dict matches 'x"):
        torch_ckpt.preflight({"w": torch.zeros(2)}, tmp_path, names=["x.*"])
    report = torch_ckpt.preflight({"w": torch.zeros(2), "o": {}}, tmp_path)
    assert not report.fits
    assert "o is an empty dict, but the checkpoint has o.lr" in report.refused[0]


class Part:
    """A value with a state of two tensors."""

    def __init__(self, fill: float) -> None:
        self.tensors = {"t": torch.full((2,), fill), "u": torch.full((2,), fill)}

    def state_dict(self) -> dict[str, Any]:
        return {**self.tensors, "kind": "part"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensors = {name: state[name] for name in self.tensors}


def test_a_key_may_begin_with_another_key(tmp_path: Path) -> None:
    def state(fill: float) -> dict[str, Any]:
        torch.manual_seed(0)
        optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=fill)
        return {"a": Part(fill), "a.b": Part(2 * fill), "o": optimizer, "o.s": Part(3 * fill)}

    torch_ckpt.save(state(1.0), tmp_path)
    fresh = state(0.0)
    torch_ckpt.load(fresh, tmp_path)
    assert [fresh[k].tensors["t"][0].item() for k in ("a", "a.b", "o.s")] == [1, 2, 3]
    assert fresh["o"].param_groups[0]["lr"] == 1
    alone = {"a": Part(0.0)}
    torch_ckpt.load(alone, tmp_path)
    assert alone["a"].tensors["t"][0] == 1
