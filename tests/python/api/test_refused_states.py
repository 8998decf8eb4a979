"""Values that cannot be saved or loaded are named by their full key when they are saved."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

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
