"""States of modules and other objects: ``load_state_dict()`` gets the object's own state."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_ckpt
from benchmarks.ranks import mesh_without_peers
from tests.programs import State, restore, save
from tests.support import assert_equal, stock_load, stock_save
from torch_ckpt import CheckpointError, PerRank
from torch_ckpt.state.states import States

pytestmark = pytest.mark.filterwarnings(
    "error",
    "ignore:torch.distributed is disabled",
    # torch deprecates its quantized modules and tensors.
    "ignore:.*deprecated",
)


# --- ways to save and restore --------------------------------------------------------------------


def _by_functions(saved: State, fresh: State, path: Path) -> None:
    torch_ckpt.save(saved, path)
    torch_ckpt.load(fresh, path)


def _by_freeing(saved: State, fresh: State, path: Path) -> None:
    torch_ckpt.save(saved, path)
    torch_ckpt.load(fresh, path, free_before_read=True)


def _by_structure(saved: State, fresh: State, path: Path) -> None:
    save(saved, path)
    restore(fresh, path)


def _by_manager(saved: State, fresh: State, path: Path) -> None:
    with torch_ckpt.CheckpointManager(path) as manager:
        manager.save(1, saved)
    with torch_ckpt.CheckpointManager(path) as manager:
        assert manager.restore(fresh) == 1


def _by_async_checkpoint(saved: State, fresh: State, path: Path) -> None:
    checkpoint = torch_ckpt.AsyncCheckpoint(**saved)
    checkpoint.write(path)
    checkpoint.sync()
    torch_ckpt.AsyncCheckpoint(**fresh).read(path)


def _by_stock(saved: State, fresh: State, path: Path) -> None:
    stock_save(saved, path)
    stock_load(fresh, path)


OURS = (_by_functions, _by_freeing, _by_structure, _by_manager, _by_async_checkpoint)
Restoring = Callable[[State, State, Path], None]

with_each_way = pytest.mark.parametrize("way", [*OURS, _by_stock])


# --- versions ------------------------------------------------------------------------------------


class Versioned(nn.Linear):
    """Doubles its weight when it loads a state of an older version, such as one without version."""

    _version = 2

    def __init__(self) -> None:
        super().__init__(2, 2)

    def _load_from_state_dict(
        self, state: State, prefix: str, metadata: State, *others: Any
    ) -> None:
        if metadata.get("version") != 2:
            state[f"{prefix}weight"] = 2 * state[f"{prefix}weight"]
        super()._load_from_state_dict(state, prefix, metadata, *others)


def _nested() -> nn.Module:
    return nn.Sequential(nn.Sequential(Versioned(), nn.BatchNorm1d(2)), Versioned())


def _compiled() -> nn.Module:
    with warnings.catch_warnings():
        # The compiler of torch 2.11 uses functions that torch 2.11 deprecates.
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.compile(_nested())  # type: ignore[return-value]


@with_each_way
@pytest.mark.parametrize("make", [Versioned, _nested, _compiled])
def test_a_module_does_not_migrate_a_state_of_its_own_version(
    tmp_path: Path, make: Callable[[], nn.Module], way: Restoring
) -> None:
    saved, fresh = make(), make()
    way({"model": saved}, {"model": fresh}, tmp_path)
    assert_equal(fresh.state_dict(), saved.state_dict())


def test_a_module_in_ddp_does_not_migrate_a_state_of_its_own_version(tmp_path: Path) -> None:
    with mesh_without_peers(1, 0):
        saved, fresh = DistributedDataParallel(_nested()), DistributedDataParallel(_nested())
        _by_functions({"model": saved}, {"model": fresh}, tmp_path)
    assert_equal(fresh.state_dict(), saved.state_dict())


def test_a_module_of_each_rank_does_not_migrate_a_state_of_its_own_version(tmp_path: Path) -> None:
    saved, fresh = _nested(), _nested()
    _by_functions({"model": PerRank(saved)}, {"model": PerRank(fresh)}, tmp_path)
    assert_equal(fresh.state_dict(), saved.state_dict())


class BestModel:
    """Stateful that keeps a copy of the best state of a module."""

    def __init__(self, best: State | None = None) -> None:
        self.best = best

    def state_dict(self) -> State:
        return {"best": self.best}

    def load_state_dict(self, state: State) -> None:
        self.best = state["best"]


@pytest.mark.parametrize("wrap", [lambda value: value, PerRank], ids=["shared", "per rank"])
@pytest.mark.parametrize("has_state", [False, True])
def test_a_module_state_in_another_state_keeps_its_versions(
    tmp_path: Path, wrap: Callable[[Any], Any], has_state: bool
) -> None:
    saved, fresh = _nested(), _nested()
    kept = BestModel(copy.deepcopy(saved.state_dict()))
    restored = BestModel(copy.deepcopy(fresh.state_dict()) if has_state else None)
    _by_functions({"best": wrap(kept)}, {"best": wrap(restored)}, tmp_path)
    assert restored.best is not None
    fresh.load_state_dict(restored.best)
    assert_equal(fresh.state_dict(), saved.state_dict())


def _quantized(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    torch.backends.quantized.engine = torch.backends.quantized.supported_engines[-1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        layer = torch.ao.nn.quantized.Linear(4, 3)
    weight = torch.quantize_per_tensor(torch.rand(3, 4), 0.01, 0, torch.qint8)
    layer.set_weight_bias(weight, torch.rand(3))
    return nn.Sequential(layer)


@pytest.mark.parametrize("way", OURS)
def test_a_quantized_module_is_restored(tmp_path: Path, way: Restoring) -> None:
    saved, fresh = _quantized(1), _quantized(2)
    way({"model": saved}, {"model": fresh}, tmp_path)
    example = torch.quantize_per_tensor(torch.rand(2, 4), 0.1, 0, torch.quint8)
    assert_equal(fresh(example).int_repr(), saved(example).int_repr())


# --- the object that load_state_dict() gets ------------------------------------------------------


class Annotated(OrderedDict[str, Any]):
    """State with an attribute."""

    note = ""


class Recorder:
    """Stateful that records which object it gets.

    Args:
        kind: type of its state.
    """

    def __init__(self, kind: type, value: float) -> None:
        self.own = kind()
        self.own["tensor"] = torch.full((2,), value)
        self.own["number"] = value
        self.own["nested"] = OrderedDict(tensor=torch.full((3,), value), list=[value])
        if not issubclass(kind, dict) or kind is not dict:
            self.own.note = f"note {value}"
        self.own["nested"].note = f"nested note {value}"  # type: ignore[attr-defined]
        self.got: Any = None

    def state_dict(self) -> Any:
        return self.own

    def load_state_dict(self, state: Any) -> None:
        self.got = state


@with_each_way
@pytest.mark.parametrize("kind", [dict, OrderedDict, Annotated])
def test_load_state_dict_gets_the_object_that_state_dict_returned(
    tmp_path: Path, way: Restoring, kind: type
) -> None:
    saved, fresh = Recorder(kind, 2.0), Recorder(kind, 0.0)
    own, nested, tensor = fresh.own, fresh.own["nested"], fresh.own["tensor"]
    way({"recorder": saved}, {"recorder": fresh}, tmp_path)
    assert fresh.got is own
    assert fresh.got["nested"] is nested
    assert fresh.got["tensor"] is tensor
    assert nested.note == "nested note 0.0"
    assert kind is dict or own.note == "note 0.0"
    assert_equal(dict(fresh.got), dict(saved.own))


@with_each_way
def test_a_module_gets_the_object_that_its_state_dict_returned(
    tmp_path: Path, way: Restoring
) -> None:
    class Recording(nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            self.own = super().state_dict(*args, **kwargs)
            return self.own

        def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
            assert state is self.own
            return super().load_state_dict(state, *args, **kwargs)

    saved, fresh = Recording(2, 2), Recording(2, 2)
    way({"model": saved}, {"model": fresh}, tmp_path)
    assert_equal(fresh.state_dict(), saved.state_dict())


def test_a_state_whose_containers_the_object_still_uses_is_restored(tmp_path: Path) -> None:
    class Clearing:
        def __init__(self, count: int) -> None:
            self.counts = {"seen": count}
            self.tensors = [torch.full((2,), count)] * count

        def state_dict(self) -> State:
            return {"counts": self.counts, "tensors": self.tensors}

        def load_state_dict(self, state: State) -> None:
            self.counts.clear()
            self.counts.update(state["counts"])
            self.tensors.clear()
            self.tensors.extend(state["tensors"])

    saved, fresh = Clearing(2), Clearing(1)
    _by_functions({"value": saved}, {"value": fresh}, tmp_path)
    assert_equal(fresh.state_dict(), saved.state_dict())


def test_names_of_a_module_that_become_the_same_are_refused() -> None:
    class Twice(nn.Module):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            prefix = "_checkpoint_wrapped_module"
            return {"weight": torch.ones(1), f"{prefix}.weight": torch.zeros(1)}

    with pytest.raises(
        CheckpointError,
        match=r"^model: .*weight and _checkpoint_wrapped_module.weight would both be .* weight",
    ):
        States({"model": Twice()}).saved()
