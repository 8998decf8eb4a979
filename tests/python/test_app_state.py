"""torch_ckpt.app_state: what is saved of a program, and that it goes on as if nothing had been."""

from __future__ import annotations

import copy
import enum
import io
import random
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

import torch_ckpt
from tests.fresh import in_fresh_process
from tests.support import assert_equal, cause_of
from torch_ckpt.app_state import AppState, BeforeSave, PerRank, RNGState
from torch_ckpt.errors import CheckpointError, LoadMismatch

State = dict[str, Any]
Parameters = Iterator[nn.Parameter]


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def save(state: State, path: Path) -> None:
    torch_ckpt.save(AppState(state).state_dict(), path)


def restore(state: State, path: Path, **load_options: Any) -> None:
    app_state = AppState(state)
    target = app_state.target()
    torch_ckpt.load(target, path, **load_options)
    app_state.apply(target)


def kept(state: State, path: Path, fresh: State) -> State:
    """A fresh state with what a checkpoint of the other one gives it."""
    save(state, path)
    restore(fresh, path)
    return fresh


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))


def program(optimizer: Callable[[Parameters], torch.optim.Optimizer], seed: int = 0) -> State:
    torch.manual_seed(seed)
    module = model()
    chosen = optimizer(module.parameters())
    return {
        "model": module,
        "optimizer": chosen,
        "scheduler": lr_scheduler.StepLR(chosen, 2),
        "steps": 0,
        "rng": RNGState(),
    }


def train(state: State, steps: int) -> None:
    for _ in range(steps):
        state["model"](torch.randn(16, 4)).square().mean().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["scheduler"].step()
        state["steps"] += 1


def outcome(state: State) -> State:
    """All that training has brought forth."""
    parts = {key: state[key].state_dict() for key in ("model", "optimizer", "scheduler", "rng")}
    numpy_state = parts["rng"].pop("numpy", None)
    return parts | {"steps": state["steps"], "numpy": repr(numpy_state)}


OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, weight_decay=0.1),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, weight_decay=0.1, foreach=True),
    "AdamW with a tensor as learning rate": lambda p: torch.optim.AdamW(
        p, lr=torch.tensor(0.01), foreach=False
    ),
    "Adam fused": lambda p: torch.optim.Adam(p, weight_decay=0.1, amsgrad=True, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1
    ),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.1),
    "Adafactor": torch.optim.Adafactor,
    "NAdam": torch.optim.NAdam,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
}


# --- resuming ------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_bit_by_bit_after_a_restore(
    tmp_path: Path, name: str, before: int
) -> None:
    through = program(OPTIMIZERS[name])
    train(through, before + 3)
    interrupted = program(OPTIMIZERS[name])
    train(interrupted, before)
    save(interrupted, tmp_path)
    resumed = program(OPTIMIZERS[name], seed=1)
    restore(resumed, tmp_path)
    train(resumed, 3)
    assert_equal(outcome(resumed), outcome(through))


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_save_changes_nothing_of_training(name: str, before: int) -> None:
    undisturbed = program(OPTIMIZERS[name])
    train(undisturbed, before + 3)
    saved = program(OPTIMIZERS[name])
    train(saved, before)
    AppState(saved).state_dict()
    AppState(saved).target()
    train(saved, 3)
    assert_equal(outcome(saved), outcome(undisturbed))


@pytest.mark.parametrize("before", [0, 3])
def test_a_restore_over_a_program_that_has_trained_leaves_nothing_of_it(
    tmp_path: Path, before: int
) -> None:
    saved = program(OPTIMIZERS["AdamW"])
    train(saved, before)
    save(saved, tmp_path)
    expected = outcome(saved)
    other = program(OPTIMIZERS["AdamW"], seed=1)
    train(other, 2)
    restore(other, tmp_path)
    assert_equal(outcome(other), expected)


def _resume(path: Path, steps: int) -> bytes:
    state = program(OPTIMIZERS["AdamW"], seed=1)
    restore(state, path)
    train(state, steps)
    result = io.BytesIO()
    torch.save(outcome(state), result)
    return result.getvalue()


def test_training_goes_on_bit_by_bit_in_a_fresh_process(tmp_path: Path) -> None:
    interrupted = program(OPTIMIZERS["AdamW"])
    train(interrupted, 3)
    save(interrupted, tmp_path)
    resumed = in_fresh_process(_resume, tmp_path, 3)
    train(interrupted, 3)
    assert_equal(torch.load(io.BytesIO(resumed), weights_only=False), outcome(interrupted))


def test_a_part_that_is_not_loaded_stays_as_it_was(tmp_path: Path) -> None:
    saved = program(OPTIMIZERS["AdamW"])
    train(saved, 3)
    del saved["rng"]
    save(saved, tmp_path)
    other = program(OPTIMIZERS["AdamW"], seed=1)
    train(other, 1)
    del other["rng"]
    before = copy.deepcopy({k: other[k].state_dict() for k in ("optimizer", "scheduler")})
    restore(other, tmp_path, names=["model.*"])
    assert_equal(other["model"].state_dict(), saved["model"].state_dict())
    assert_equal({k: other[k].state_dict() for k in before}, before)
    assert other["steps"] == 1


# --- optimizers ----------------------------------------------------------------------------------


def test_saving_before_the_first_step_calls_no_hook_of_the_optimizer() -> None:
    state = program(OPTIMIZERS["AdamW"])
    called: list[str] = []
    state["optimizer"].register_step_post_hook(lambda *_: called.append("its own"))
    handle = register_optimizer_step_post_hook(lambda *_: called.append("all optimizers'"))
    AppState(state).state_dict()
    handle.remove()
    assert called == []


def test_saving_before_the_first_step_leaves_the_optimizer_without_state() -> None:
    state = program(OPTIMIZERS["AdamW"])
    AppState(state).state_dict()
    assert not state["optimizer"].state
    assert all(parameter.grad is None for parameter in state["model"].parameters())


def test_saving_with_gradients_before_the_first_step_keeps_them() -> None:
    state = program(OPTIMIZERS["SGD with momentum"])
    state["model"](torch.ones(2, 4)).sum().backward()
    before = [parameter.grad.clone() for parameter in state["model"].parameters()]
    AppState(state).state_dict()
    assert_equal([parameter.grad for parameter in state["model"].parameters()], before)


class _Noisy(torch.optim.Optimizer):
    """Draws its state at random."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["noise"] = torch.randn_like(parameter)


def test_making_a_state_draws_no_random_numbers() -> None:
    layer = nn.Linear(2, 2)
    before = torch.get_rng_state()
    AppState({"model": layer, "optimizer": _Noisy(layer.parameters())}).state_dict()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_parameter_that_never_had_a_gradient_has_no_state_after_a_restore(
    tmp_path: Path,
) -> None:
    def parts() -> State:
        module = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
        return {"model": module, "optimizer": torch.optim.AdamW(module.parameters())}

    state = parts()
    state["model"]["used"](torch.ones(1, 2)).sum().backward()
    state["optimizer"].step()
    restored = kept(state, tmp_path, parts())
    names = dict(restored["model"].named_parameters())
    has_state = {name for name, p in names.items() if p in restored["optimizer"].state}
    assert has_state == {"used.weight", "used.bias"}


def test_frozen_parameters_have_no_state_in_the_checkpoint() -> None:
    layer = nn.Linear(2, 2)
    layer.weight.requires_grad_(False)
    found = AppState({"model": layer, "optimizer": torch.optim.AdamW(layer.parameters())})
    assert set(found.state_dict()["optimizer"]["state"]) == {"bias"}


def test_the_states_dtype_is_kept_where_it_is_not_the_parameters(tmp_path: Path) -> None:
    class Wide(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["mean"] = torch.full(parameter.shape, 1 / 3)

    def parts() -> State:
        layer = nn.Linear(2, 2).bfloat16()
        return {"model": layer, "optimizer": Wide(layer.parameters())}

    state = parts()
    state["optimizer"].step()
    restored = kept(state, tmp_path, parts())
    assert_equal(
        restored["optimizer"].state[restored["model"].weight]["mean"], torch.full((2, 2), 1 / 3)
    )


def test_a_learning_rate_that_is_a_tensor_stays_the_same_tensor(tmp_path: Path) -> None:
    saved = program(OPTIMIZERS["AdamW with a tensor as learning rate"])
    saved["optimizer"].param_groups[0]["lr"].fill_(0.5)
    fresh = program(OPTIMIZERS["AdamW with a tensor as learning rate"])
    rate = fresh["optimizer"].param_groups[0]["lr"]
    kept(saved, tmp_path, fresh)
    assert fresh["optimizer"].param_groups[0]["lr"] is rate
    assert rate == 0.5


def test_several_models_and_optimizers_are_told_apart(tmp_path: Path) -> None:
    def gan(seed: int) -> State:
        torch.manual_seed(seed)
        parts = {"generator": nn.Linear(2, 3), "critic": nn.Linear(3, 1)}
        optimizers = {f"{k} optimizer": torch.optim.Adam(m.parameters()) for k, m in parts.items()}
        for module in parts.values():
            module(torch.ones(1, module.in_features)).sum().backward()
        for number, optimizer in enumerate(optimizers.values()):
            for _ in range(number + seed + 1):
                optimizer.step()
        return parts | optimizers

    state = gan(0)
    restored = kept(state, tmp_path, gan(1))
    for key, value in state.items():
        assert_equal(restored[key].state_dict(), value.state_dict(), key)


def test_an_optimizer_of_several_modules_names_them() -> None:
    modules = {"encoder": nn.Linear(2, 2), "decoder": nn.Linear(2, 2)}
    parameters = [p for module in modules.values() for p in module.parameters()]
    found = AppState({**modules, "optimizer": torch.optim.Adam(parameters)}).state_dict()
    assert list(found["optimizer"]["state"]) == [
        "encoder.weight",
        "encoder.bias",
        "decoder.weight",
        "decoder.bias",
    ]


def test_an_optimizer_whose_names_would_be_the_same_has_numbers() -> None:
    modules = {"a": nn.ModuleDict({"b": nn.Linear(2, 2)}), "a.b": nn.Linear(2, 2)}
    parameters = [p for module in modules.values() for p in module.parameters()]
    found = AppState({**modules, "optimizer": torch.optim.Adam(parameters)}).state_dict()
    assert list(found["optimizer"]["state"]) == ["0", "1", "2", "3"]


def test_an_optimizer_of_no_module_in_the_mapping_is_restored_by_numbers(tmp_path: Path) -> None:
    def parts(steps: int) -> State:
        parameter = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.Adam([parameter])
        parameter.grad = torch.ones(3)
        for _ in range(steps):
            optimizer.step()
        return {"optimizer": optimizer}

    state = parts(2)
    restored = kept(state, tmp_path, parts(0))
    assert_equal(restored["optimizer"].state_dict(), state["optimizer"].state_dict())


def test_parameters_that_were_grouped_otherwise_are_refused(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    groups = [{"params": [layer.weight], "lr": 0.1}, {"params": [layer.bias], "lr": 0.2}]
    save({"model": layer, "optimizer": torch.optim.SGD(groups)}, tmp_path)
    one_group = {"model": layer, "optimizer": torch.optim.SGD(layer.parameters())}
    with pytest.raises(CheckpointError, match=r"^optimizer: .*not of one group in the checkpoint"):
        restore(one_group, tmp_path)


def test_the_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    save({"model": layer, "optimizer": torch.optim.Adam(layer.parameters())}, tmp_path)
    other = {"model": layer, "optimizer": torch.optim.SGD(layer.parameters())}
    with pytest.raises(CheckpointError, match=r"^optimizer: .*SGD keeps none"):
        restore(other, tmp_path)


def _stepped(make: Callable[[nn.Module], torch.optim.Optimizer]) -> State:
    """A layer, and an optimizer that has done two steps."""
    layer = nn.Linear(2, 2)
    optimizer = make(layer)
    for _ in range(2):
        layer(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return {"model": layer, "optimizer": optimizer}


def test_a_parameter_that_was_trained_and_is_frozen_now_is_refused(tmp_path: Path) -> None:
    save(_stepped(lambda layer: torch.optim.AdamW(layer.parameters())), tmp_path)
    layer = nn.Linear(2, 2)
    layer.weight.requires_grad_(False)
    fresh = {"model": layer, "optimizer": torch.optim.AdamW(layer.parameters())}
    with pytest.raises(CheckpointError, match=r"^optimizer: .*: weight .stored 3 tensors, here 0"):
        restore(fresh, tmp_path)


def test_a_parameter_that_was_never_trained_may_be_frozen_now(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    save({"model": layer, "optimizer": torch.optim.AdamW(layer.parameters())}, tmp_path)
    layer.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(layer.parameters())
    restore({"model": layer, "optimizer": optimizer}, tmp_path)
    assert not optimizer.state


def test_a_state_with_more_tensors_of_a_parameter_is_refused(tmp_path: Path) -> None:
    save(_stepped(lambda layer: torch.optim.AdamW(layer.parameters(), amsgrad=True)), tmp_path)
    layer = nn.Linear(2, 2)
    fresh = {"model": layer, "optimizer": torch.optim.AdamW(layer.parameters())}
    with pytest.raises(CheckpointError, match=r"bias .stored 4 tensors, here 3., weight .stored 4"):
        restore(fresh, tmp_path)


def test_an_option_that_was_a_tensor_and_is_none_now_is_refused(tmp_path: Path) -> None:
    rate = torch.tensor(0.1)
    save(_stepped(lambda layer: torch.optim.SGD(layer.parameters(), lr=rate)), tmp_path)
    layer = nn.Linear(2, 2)
    fresh = {"model": layer, "optimizer": torch.optim.SGD(layer.parameters(), lr=0.1)}
    with pytest.raises(CheckpointError, match=r"^optimizer: .*lr of group 0 was saved as a tensor"):
        restore(fresh, tmp_path)


def _lbfgs(seed: int, iterations: int) -> State:
    torch.manual_seed(seed)
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=iterations)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = (layer(torch.tensor([[1.0, 2.0], [3.0, 5.0]])) - 1).pow(2).sum()
        value.backward()
        return value

    optimizer.step(loss)  # type: ignore[arg-type]
    return {"model": layer, "optimizer": optimizer}


def test_a_state_that_has_grown_since_is_refused(tmp_path: Path) -> None:
    save(_lbfgs(0, 6), tmp_path)
    with pytest.raises(CheckpointError, match=r"^optimizer: .*weight .stored .*PerRank.optimizer"):
        restore(_lbfgs(1, 3), tmp_path)


def test_groups_in_another_order_keep_their_learning_rates_that_are_tensors(
    tmp_path: Path,
) -> None:
    def groups(layer: nn.Linear, rates: list[float]) -> list[dict[str, Any]]:
        pairs = zip([layer.weight, layer.bias], rates, strict=True)
        return [{"params": [p], "lr": torch.tensor(rate)} for p, rate in pairs]

    save(_stepped(lambda layer: torch.optim.AdamW(groups(layer, [0.5, 0.25]))), tmp_path)
    layer = nn.Linear(2, 2)
    of_weight, of_bias = groups(layer, [0.0, 0.0])
    restore({"model": layer, "optimizer": torch.optim.AdamW([of_bias, of_weight])}, tmp_path)
    assert (of_weight["lr"].item(), of_bias["lr"].item()) == (0.5, 0.25)


def test_states_that_are_loaded_alone_are_taken(tmp_path: Path) -> None:
    state = _stepped(lambda layer: torch.optim.AdamW(layer.parameters()))
    save(state, tmp_path)
    layer = nn.Linear(2, 2)
    fresh = {"model": layer, "optimizer": torch.optim.AdamW(layer.parameters())}
    restore(fresh, tmp_path, names=["model.*", "optimizer.state.*"])
    expected = state["optimizer"].state_dict()["state"]
    assert_equal(fresh["optimizer"].state_dict()["state"], expected)


def test_a_state_that_the_rank_of_the_options_did_not_have_is_taken(tmp_path: Path) -> None:
    # As with experts, whose parameters have no gradient on some ranks.
    layer = nn.Linear(2, 2)
    app_state = AppState({"model": layer, "optimizer": torch.optim.AdamW(layer.parameters())})
    of_rank_0 = app_state.state_dict()
    app_state.state.update(_stepped(lambda layer: torch.optim.AdamW(layer.parameters())))
    stored = app_state.state_dict()
    stored["optimizer"]["without_state"] = of_rank_0["optimizer"]["without_state"]
    torch_ckpt.save(stored, tmp_path)
    optimizer = torch.optim.AdamW(layer.parameters())
    restore({"model": layer, "optimizer": optimizer}, tmp_path)
    expected = app_state.state["optimizer"].state_dict()["state"]
    assert_equal(optimizer.state_dict()["state"], expected)


def test_an_optimizer_whose_state_cannot_be_made_is_named(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    state = {"model": layer, "lbfgs": torch.optim.LBFGS(layer.parameters())}
    save(state, tmp_path)
    with pytest.raises(CheckpointError, match=r"^lbfgs: .*PerRank\(optimizer\)"):
        restore(state, tmp_path)


# --- names ---------------------------------------------------------------------------------------


def _compiled() -> nn.Module:
    return torch.compile(model())  # type: ignore[return-value]


def _tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    return module


@pytest.mark.parametrize("make", [model, _compiled, _tied])
def test_names_are_those_of_torch(make: Callable[[], nn.Module]) -> None:
    module = make()
    optimizer = torch.optim.AdamW(module.parameters())
    found = AppState({"model": module, "optimizer": optimizer}).state_dict()
    of_module, of_optimizer = get_state_dict(module, optimizer)
    assert set(found["model"]) == set(of_module)
    assert set(found["optimizer"]["state"]) == set(of_optimizer["state"])


def test_a_compiled_model_and_a_plain_one_take_each_others_state(tmp_path: Path) -> None:
    plain, compiled = model(), _compiled()
    kept({"model": compiled}, tmp_path / "compiled", {"model": plain})
    assert_equal(list(plain.state_dict().values()), list(compiled.state_dict().values()))
    other = _compiled()
    kept({"model": plain}, tmp_path / "plain", {"model": other})
    assert_equal(list(other.state_dict().values()), list(plain.state_dict().values()))


def test_modules_of_fsdp1_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # A real one takes ranks.
    monkeypatch.setattr("torch_ckpt.app_state.FullyShardedDataParallel", nn.Dropout)
    with pytest.raises(CheckpointError, match=r"^model: .*FSDP1. is not supported; fully_shard is"):
        AppState({"model": model()}).state_dict()


class _WithExtraState(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_a_modules_extra_state_may_change_its_form(tmp_path: Path) -> None:
    saved = _WithExtraState({"scales": [1.0, torch.ones(2)]})
    restored = kept({"model": saved}, tmp_path, {"model": _WithExtraState(None)})
    assert_equal(restored["model"].extra, saved.extra)


def test_a_tensor_of_extra_state_may_change_its_length(tmp_path: Path) -> None:
    packed = torch.arange(5, dtype=torch.uint8)
    fresh = _WithExtraState(torch.empty(0, dtype=torch.uint8))
    kept({"model": _WithExtraState(packed)}, tmp_path, {"model": fresh})
    assert_equal(fresh.extra, packed)


def test_a_module_on_the_meta_device_is_refused() -> None:
    with torch.device("meta"):
        module = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"^model: .*weight is on the meta .*to_empty"):
        AppState({"model": module}).target()


# --- other values --------------------------------------------------------------------------------


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


def test_a_scheduler_may_get_other_milestones(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    saved = lr_scheduler.MultiStepLR(optimizer, [2, 5])
    other = lr_scheduler.MultiStepLR(optimizer, [7])
    kept({"scheduler": saved}, tmp_path, {"scheduler": other})
    assert other.milestones == Counter([2, 5])


def test_a_grad_scaler_is_restored(tmp_path: Path) -> None:
    saved = torch.amp.GradScaler("cpu", init_scale=64.0)
    restored = torch.amp.GradScaler("cpu")
    kept({"scaler": saved}, tmp_path, {"scaler": restored})
    assert restored.state_dict() == saved.state_dict()


class _Averages:
    """Has a state of tensors and other things."""

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


def test_a_stateful_with_fewer_tensors_than_stored_is_refused(tmp_path: Path) -> None:
    saved, restored = _Averages(2.0), _Averages(0.0)
    del restored.tensors[1]
    with pytest.raises(CheckpointError, match=r"^averages: .*has 3 tensors of it.*there are 2"):
        kept({"averages": saved}, tmp_path, {"averages": restored})


def test_a_stateful_with_more_tensors_than_stored_is_refused(tmp_path: Path) -> None:
    saved, restored = _Averages(2.0), _Averages(0.0)
    restored.tensors.append(torch.ones(4))
    with pytest.raises(CheckpointException) as caught:
        kept({"averages": saved}, tmp_path, {"averages": restored})
    error = cause_of(caught.value)
    assert isinstance(error, LoadMismatch)
    assert error.report.missing == ["averages.tensors.2"]


def test_a_stateful_whose_state_is_a_bare_tensor_is_refused() -> None:
    class Generator:
        def state_dict(self) -> torch.Tensor:
            return torch.ones(3)

        def load_state_dict(self, state: torch.Tensor) -> None: ...

    with pytest.raises(CheckpointError, match=r"state_dict\(\) of noise is a tensor.*a dict that"):
        AppState({"noise": Generator()}).state_dict()


PLAIN: list[Any] = [
    3,
    0.1,
    True,
    None,
    "text",
    b"bytes",
    1 + 2j,
    [1, "two", [3.0]],
    (1, (2, 3)),
    {"a": {"b": 1}, 2: "two"},
    {},
    [],
    {1, 2},
    OrderedDict(b=1, a=2),
    Counter("abc"),
    deque([1, 2], 5),
    torch.float16,
    torch.Size([2, 3]),
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_are_replaced_in_the_mapping(tmp_path: Path, value: Any) -> None:
    fresh = type(value)() if isinstance(value, int | list | dict) else value
    restored = kept({"value": value}, tmp_path, {"value": fresh})["value"]
    assert restored == value
    assert type(restored) is type(value)


@pytest.mark.parametrize(
    ("saved", "fresh"),
    [([1, 2], None), (None, [1, 2]), ({"a": 1}, 0), (0.5, {}), ((1, 2), "text"), ([], {"a": 1})],
    ids=repr,
)
def test_a_plain_value_may_change_its_type(tmp_path: Path, saved: Any, fresh: Any) -> None:
    restored = kept(
        {"best": saved, "other": {"a": 1}}, tmp_path, {"best": fresh, "other": {"a": 0}}
    )
    assert restored == {"best": saved, "other": {"a": 1}}


@pytest.mark.parametrize("fresh", [0, [1]])
def test_a_plain_value_that_is_not_loaded_stays(tmp_path: Path, fresh: Any) -> None:
    save({"best": 5, "other": 6}, tmp_path)
    state = {"best": fresh, "other": 7}
    restore(state, tmp_path, names=["other"])
    assert state == {"best": fresh, "other": 6}


def test_a_plain_value_that_the_checkpoint_lacks_is_missing(tmp_path: Path) -> None:
    save({"best": 5}, tmp_path)
    with pytest.raises(CheckpointException) as caught:
        restore({"best": 0, "number": 0, "list": []}, tmp_path)
    error = cause_of(caught.value)
    assert isinstance(error, LoadMismatch)
    assert error.report.missing == ["list._objects", "number"]


@pytest.mark.parametrize("saved", [np.float64(0.5), np.float32(0.5), np.int64(3), np.bool_(True)])
def test_a_numpy_number_is_restored_as_pythons(tmp_path: Path, saved: Any) -> None:
    restored = kept({"best": saved}, tmp_path, {"best": float("inf")})["best"]
    assert restored == saved.item()
    assert type(restored) is type(saved.item())


def test_keys_that_are_the_same_as_text_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"^ema: .*are the same as text"):
        AppState({"ema": {1: torch.zeros(2), "1": torch.ones(2)}}).state_dict()


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
        stored = AppState({"value": value}).state_dict()["value"]["_objects"].value
    assert type(of(stored)) is torch.Tensor
    assert type(stored) is type(value)
    assert type(of(value)) is _Elsewhere


def test_arrays_are_restored(tmp_path: Path) -> None:
    restored = kept({"value": [np.arange(3)]}, tmp_path, {"value": [0]})
    assert restored["value"][0].tolist() == [0, 1, 2]


def test_tensors_in_dicts_and_lists_are_filled_in_place(tmp_path: Path) -> None:
    tensors = [torch.zeros(2), torch.zeros(3), torch.zeros(4)]
    saved = {"ema": {1: torch.ones(2), "l": [5, torch.ones(3)], "o": OrderedDict(a=torch.ones(4))}}
    fresh = {"ema": {1: tensors[0], "l": [0, tensors[1]], "o": OrderedDict(a=tensors[2])}}
    restored = kept(saved, tmp_path, fresh)["ema"]
    assert_equal(restored, saved["ema"])
    assert restored[1] is tensors[0]
    assert restored["l"][1] is tensors[1]
    assert restored["o"]["a"] is tensors[2]


def test_a_tensor_is_filled_in_place(tmp_path: Path) -> None:
    tensor = torch.zeros(3, requires_grad=True)
    state = kept({"w": torch.ones(3)}, tmp_path, {"w": tensor})
    assert state["w"] is tensor
    assert_equal(tensor.detach(), torch.ones(3))


class _OfThisTest:
    pass


@pytest.fixture
def nothing_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_ckpt.objects._checked", set())


@pytest.mark.usefixtures("nothing_looked_at")
def test_what_will_not_load_is_named_at_the_save() -> None:
    with pytest.warns(UserWarning, match=r"config\.0: .*_OfThisTest.*add_safe_globals"):
        AppState({"config": [_OfThisTest()]}).state_dict()


@pytest.mark.usefixtures("nothing_looked_at")
def test_what_comes_later_and_will_not_load_is_named_once() -> None:
    config: State = {"nested": [{"a": 1}]}
    app_state = AppState({"config": config})
    app_state.state_dict()
    config["nested"][0]["a"] = _OfThisTest()
    with pytest.warns(UserWarning, match=r"config\.nested\.0\.a: .*_OfThisTest"):
        app_state.state_dict()
    app_state.state_dict()


class _Phase(enum.IntEnum):
    WARM_UP = 1


@pytest.mark.usefixtures("nothing_looked_at")
def test_a_number_that_is_more_than_that_is_looked_at_too() -> None:
    with pytest.warns(UserWarning, match=r"phase: .*_Phase.*add_safe_globals"):
        AppState({"phase": _Phase.WARM_UP}).state_dict()


def test_names_that_are_no_str_are_refused() -> None:
    with pytest.raises(TypeError, match="must be str, got 1"):
        AppState({1: 2}).state_dict()  # type: ignore[dict-item]


def test_a_state_that_cannot_be_read_is_named() -> None:
    class Broken:
        def state_dict(self) -> State:
            raise RuntimeError("the worker has died")

        def load_state_dict(self, state: State) -> None: ...

    with pytest.raises(CheckpointError, match=r"^loader: .* on rank 0: the worker has died"):
        AppState({"loader": Broken()}).state_dict()


# --- each rank's own -----------------------------------------------------------------------------


def test_random_numbers_go_on_after_a_restore(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [torch.rand(()).item(), random.random(), np.random.rand()]

    save({"rng": RNGState()}, tmp_path)
    drawn = draw()
    restore({"rng": RNGState()}, tmp_path)
    assert draw() == drawn


def test_a_per_rank_value_may_change_its_form(tmp_path: Path) -> None:
    value = {"position": 3, "buffer": [torch.arange(3)]}
    restored = kept({"own": PerRank(value)}, tmp_path, {"own": PerRank(None)})
    assert_equal(restored["own"].value, value)


def test_a_per_rank_tensor_is_filled_in_place(tmp_path: Path) -> None:
    tensor = torch.zeros(2)
    kept({"own": PerRank(torch.ones(2))}, tmp_path, {"own": PerRank(tensor)})
    assert_equal(tensor, torch.ones(2))


def test_a_per_rank_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^own: .*it is \[3\], saved was \[2\]"):
        kept({"own": PerRank(torch.ones(2))}, tmp_path, {"own": PerRank(torch.zeros(3))})


def test_a_per_rank_optimizer_needs_no_state_to_be_restored(tmp_path: Path) -> None:
    def parts() -> tuple[torch.optim.Optimizer, State]:
        optimizer = torch.optim.LBFGS([nn.Parameter(torch.ones(2))])
        return optimizer, {"optimizer": PerRank(optimizer)}

    saved, state = parts()
    [parameter] = saved.param_groups[0]["params"]

    def loss() -> torch.Tensor:
        saved.zero_grad()
        value = parameter.pow(4).sum()
        value.backward()
        return value

    saved.step(loss)  # type: ignore[arg-type]
    restored, fresh = parts()
    kept(state, tmp_path, fresh)
    assert_equal(restored.state_dict(), saved.state_dict())


class StatefulDataLoader:
    """Has the name of torchdata's."""

    position = 0

    def state_dict(self) -> State:
        return {"position": self.position} if self.position else {}

    def load_state_dict(self, state: State) -> None:
        self.position = state["position"]


def test_a_data_loader_of_torchdata_is_each_ranks_own(tmp_path: Path) -> None:
    loader = StatefulDataLoader()
    loader.position = 7
    assert set(AppState({"loader": loader}).state_dict()["loader"]) == {"rank0"}
    restored = kept({"loader": loader}, tmp_path, {"loader": StatefulDataLoader()})
    assert restored["loader"].position == 7


def test_a_rank_of_which_nothing_was_saved_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save({"own": PerRank(1), "other": PerRank(2), "steps": 3}, tmp_path)
    monkeypatch.setattr("torch_ckpt.app_state.own_rank", lambda: 4)
    state: State = {"own": PerRank(10), "other": PerRank(20), "steps": 0}
    with pytest.warns(UserWarning, match="own, other: no state of rank 4") as caught:
        restore(state, tmp_path)
    assert len(caught) == 1
    assert (state["own"].value, state["other"].value, state["steps"]) == (10, 20, 3)


def test_each_ranks_own_that_the_checkpoint_lacks_altogether_is_missing(tmp_path: Path) -> None:
    save({"loader": PerRank({"position": 7})}, tmp_path)
    with pytest.raises(CheckpointException) as caught:
        restore({"renamed": PerRank({"position": 0})}, tmp_path)
    error = cause_of(caught.value)
    assert isinstance(error, LoadMismatch)
    assert error.report.missing == ["renamed.rank0"]


@pytest.mark.parametrize("rank", [0, 4])
def test_each_ranks_own_that_is_not_to_be_loaded_stays_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    save({"own": PerRank(1), "steps": 3}, tmp_path)
    monkeypatch.setattr("torch_ckpt.app_state.own_rank", lambda: rank)
    state: State = {"own": PerRank(10), "steps": 0}
    restore(state, tmp_path, names=["steps"])
    assert (state["own"].value, state["steps"]) == (10, 3)


def test_what_the_checkpoint_lacks_stays_in_a_load_that_is_not_strict(tmp_path: Path) -> None:
    save({"steps": 3}, tmp_path)
    state: State = {"own": PerRank(10), "best": 0.5, "steps": 0}
    restore(state, tmp_path, strict=False)
    assert (state["own"].value, state["best"], state["steps"]) == (10, 0.5, 3)


# --- hooks ---------------------------------------------------------------------------------------


def test_hooks_run_before_the_state_is_read() -> None:
    hooks = BeforeSave()
    state: State = {"steps": 0}
    hooks.add(lambda: state.update(steps=state["steps"] + 1))
    assert AppState(state, before_save=hooks).state_dict() == {"steps": 1}


def test_a_removed_hook_does_not_run() -> None:
    hooks = BeforeSave()
    called: list[int] = []
    handle = hooks.add(lambda: called.append(1))
    hooks.add(lambda: called.append(2))
    handle.remove()
    AppState({}, before_save=hooks).state_dict()
    assert called == [2]


def test_hooks_do_not_run_for_a_load() -> None:
    hooks = BeforeSave()
    called: list[int] = []
    hooks.add(lambda: called.append(1))
    AppState({}, before_save=hooks).target()
    assert called == []


class _Embedding(nn.Embedding):
    """Keeps new rows aside, until a checkpoint is made."""

    def before_checkpoint(self) -> None:
        with torch.no_grad():
            self.weight.fill_(7)


def test_modules_within_a_module_are_told_of_the_checkpoint() -> None:
    module = nn.Sequential(nn.Linear(2, 2), _Embedding(3, 2))
    found = AppState({"model": module}).state_dict()
    assert_equal(found["model"]["1.weight"], torch.full((3, 2), 7.0))


def test_a_hook_that_fails_names_the_value() -> None:
    class Broken:
        def before_checkpoint(self) -> None:
            raise OSError("no space")

    with pytest.raises(CheckpointError, match=r"^cache: before_checkpoint\(\) failed.*no space"):
        AppState({"cache": Broken()}).state_dict()
