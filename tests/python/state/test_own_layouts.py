"""Modules and optimizers whose states have layouts of their own, which stock torch accepts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _patch_model_state_dict,
    _patch_optimizer_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

import torch_ckpt
from benchmarks.ranks import mesh_without_peers
from tests.programs import State, kept
from tests.support import assert_equal, stock_load, stock_save

pytestmark = pytest.mark.filterwarnings("error", "ignore:torch.distributed is disabled")


def stock_kept(saved: State, path: Path, fresh: State) -> State:
    """Saves one state by stock torch, restores it into a fresh one by torch_ckpt."""
    stock_save(saved, path)
    torch_ckpt.load(fresh, path)
    return fresh


def kept_by_stock(saved: State, path: Path, fresh: State) -> State:
    stock_save(saved, path)
    stock_load(fresh, path)
    return fresh


Keeping = Callable[[State, Path, State], State]
each_way = pytest.mark.parametrize("keep", [kept, stock_kept, kept_by_stock])


# --- modules -------------------------------------------------------------------------------------


class FourBit(nn.Linear):
    """Layer with a value in its state that is no attribute of a module, as of bitsandbytes."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.absmax = torch.rand(3)

    def _save_to_state_dict(self, state: State, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(state, prefix, keep_vars)
        state[f"{prefix}weight.absmax"] = self.absmax

    def _load_from_state_dict(self, state: State, prefix: str, *others: Any) -> None:
        self.absmax = state.pop(f"{prefix}weight.absmax").clone()
        super()._load_from_state_dict(state, prefix, *others)


def _move(state: State, old: str, new: str) -> None:
    for name in [name for name in state if name.startswith(old)]:
        state[new + name.removeprefix(old)] = state.pop(name)


class Renamed(nn.Module):
    """Module whose hooks give other names to its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_state_dict_post_hook(
            lambda module, state, prefix, _metadata: _move(
                state, f"{prefix}inner.", f"{prefix}outer."
            )
        )
        self.register_load_state_dict_pre_hook(
            lambda module, state, prefix, *others: _move(
                state, f"{prefix}outer.", f"{prefix}inner."
            )
        )


@each_way
@pytest.mark.parametrize("make", [FourBit, Renamed])
@pytest.mark.parametrize("wrap", [lambda module: module, nn.Sequential], ids=["top", "nested"])
def test_a_module_whose_names_are_no_attributes_is_restored(
    tmp_path: Path,
    make: Callable[[], nn.Module],
    wrap: Callable[[nn.Module], nn.Module],
    keep: Keeping,
) -> None:
    saved, fresh = wrap(make()), wrap(make())
    keep({"model": saved}, tmp_path, {"model": fresh})
    assert_equal(fresh.state_dict(), saved.state_dict())


@pytest.mark.parametrize("make", [FourBit, Renamed])
def test_names_that_are_no_attributes_lose_the_prefix_of_ddp(
    tmp_path: Path, make: Callable[[], nn.Module]
) -> None:
    with mesh_without_peers(1, 0):
        saved = DistributedDataParallel(nn.Sequential(make()))
        torch_ckpt.save({"model": saved}, tmp_path)
        plain = nn.Sequential(make())
        torch_ckpt.load({"model": plain}, tmp_path)
        again = DistributedDataParallel(nn.Sequential(make()))
        torch_ckpt.load({"model": again}, tmp_path)
    assert_equal(plain.state_dict(), saved.module.state_dict())
    assert_equal(again.state_dict(), saved.state_dict())


def test_a_module_with_patched_state_dict_is_restored(tmp_path: Path) -> None:
    with mesh_without_peers(1, 0):
        saved, fresh = (DistributedDataParallel(nn.Linear(2, 2)) for _ in range(2))
        for module in (saved, fresh):
            _patch_model_state_dict(module)
        kept({"model": saved}, tmp_path, {"model": fresh})
    assert_equal(fresh.state_dict(), saved.state_dict())


# --- optimizers ----------------------------------------------------------------------------------


def _stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


class OptimizersContainer(torch.optim.Optimizer):
    """Optimizer of several model parts whose state dict is flat, as torchtitan's class."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self.parts = parts
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=0.1) for part in parts]
        # torchtitan calls this for Optimizer's hooks, with the groups of all parts.
        super().__init__([p for part in parts for p in part.parameters()], {})

    def step(self, closure: Any = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> State:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        found: State = {}
        for number, (part, optimizer) in enumerate(zip(self.parts, self.optimizers, strict=True)):
            state = get_optimizer_state_dict(part, optimizer, options=options)
            found |= {_numbered(name, number): value for name, value in state.items()}
        return found

    def load_state_dict(self, state: State) -> None:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        for number, (part, optimizer) in enumerate(zip(self.parts, self.optimizers, strict=True)):
            names = get_optimizer_state_dict(part, optimizer, options=options)
            own = {name: state[_numbered(name, number)] for name in names}
            set_optimizer_state_dict(part, optimizer, own, options=options)


def _numbered(name: str, part: int) -> str:
    kind, _, rest = name.partition(".")
    return f"{kind}.part{part}.{rest}"


@each_way
@pytest.mark.parametrize("steps", [0, 2])
def test_an_optimizer_whose_state_is_flat_is_restored(
    tmp_path: Path, steps: int, keep: Keeping
) -> None:
    def program(steps: int) -> State:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizer = OptimizersContainer([*model])
        for _ in range(steps):
            _stepped(model, optimizer)
        return {"model": model, "optimizer": optimizer}

    saved, fresh = program(2), program(steps)
    saved["optimizer"].optimizers[1].param_groups[0]["lr"] = 0.7
    keep(saved, tmp_path, fresh)
    assert_equal(fresh["optimizer"].state_dict(), saved["optimizer"].state_dict())


@each_way
@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("steps", [0, 2])
def test_an_optimizer_with_patched_state_dict_is_restored(
    tmp_path: Path, steps: int, flatten: bool, keep: Keeping
) -> None:
    def program(steps: int, rate: float) -> State:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        options = StateDictOptions(flatten_optimizer_state_dict=flatten)
        _patch_optimizer_state_dict(model, optimizers=(optimizer,), options=options)
        for _ in range(steps):
            _stepped(model, optimizer)
        return {"optimizer": optimizer}

    saved, fresh = program(2, 0.5), program(steps, 0.1)
    keep(saved, tmp_path, fresh)
    assert_equal(fresh["optimizer"].state_dict(), saved["optimizer"].state_dict())


class Keyed(torch.optim.SGD):
    """Optimizer with states under a text and under tuples."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.state["statistics"] = {"norms": torch.full((3,), 2.0), "count": 3}  # type: ignore[index]
        self.state[("layer", 0)] = {"scale": torch.ones(2)}  # type: ignore[index]


@pytest.mark.parametrize("steps", [0, 2])
def test_an_optimizer_with_texts_and_tuples_as_keys_is_restored(tmp_path: Path, steps: int) -> None:
    def program(steps: int) -> State:
        model = nn.Linear(2, 2)
        optimizer = Keyed(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(steps):
            _stepped(model, optimizer)
        return {"model": model, "optimizer": optimizer}

    saved, fresh = program(2), program(steps)
    kept(saved, tmp_path, fresh)
    assert_equal(fresh["optimizer"].state_dict(), saved["optimizer"].state_dict())
    parameters = [*fresh["model"].parameters()]
    assert all("momentum_buffer" in fresh["optimizer"].state[p] for p in parameters)


def test_the_optimizers_of_torchtitan_are_restored(tmp_path: Path) -> None:
    optimizers = pytest.importorskip("torchtitan.components.optimizer", exc_type=ImportError)

    def program(steps: int) -> State:
        model = nn.Linear(2, 2)
        config = optimizers.default_adamw(lr=0.1)
        config.implementation = "for-loop"
        container = config.build(model_parts=[model])
        for _ in range(steps):
            _stepped(model, container)
        return {"model": model, "optimizer": container}

    saved, fresh = program(2), program(0)
    kept(saved, tmp_path, fresh)
    assert_equal(fresh["optimizer"].state_dict(), saved["optimizer"].state_dict())
