"""torch_ckpt.state.app_state: the state of optimizers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import torch_ckpt
from tests.programs import OPTIMIZERS, State, kept, program, restore, save
from tests.support import assert_equal
from torch_ckpt.errors import CheckpointError
from torch_ckpt.state.app_state import AppState

pytestmark = pytest.mark.filterwarnings("error")


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
    """Optimizer that draws its state at random."""

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


def test_a_states_dtype_is_kept_if_it_differs_from_the_parameters(tmp_path: Path) -> None:
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


def test_a_learning_rate_in_a_tensor_stays_in_this_tensor(tmp_path: Path) -> None:
    saved = program(OPTIMIZERS["AdamW with a tensor as learning rate"])
    saved["optimizer"].param_groups[0]["lr"].fill_(0.5)
    fresh = program(OPTIMIZERS["AdamW with a tensor as learning rate"])
    rate = fresh["optimizer"].param_groups[0]["lr"]
    kept(saved, tmp_path, fresh)
    assert fresh["optimizer"].param_groups[0]["lr"] is rate
    assert rate == 0.5


def test_several_models_and_optimizers_have_separate_names(tmp_path: Path) -> None:
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


def test_an_optimizer_with_duplicate_names_has_numbers() -> None:
    modules = {"a": nn.ModuleDict({"b": nn.Linear(2, 2)}), "a.b": nn.Linear(2, 2)}
    parameters = [p for module in modules.values() for p in module.parameters()]
    found = AppState({**modules, "optimizer": torch.optim.Adam(parameters)}).state_dict()
    assert list(found["optimizer"]["state"]) == ["0", "1", "2", "3"]


def test_an_optimizer_without_a_module_in_the_mapping_is_restored_by_numbers(
    tmp_path: Path,
) -> None:
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


def test_parameters_in_other_groups_are_refused(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    groups = [{"params": [layer.weight], "lr": 0.1}, {"params": [layer.bias], "lr": 0.2}]
    save({"model": layer, "optimizer": torch.optim.SGD(groups)}, tmp_path)
    one_group = {"model": layer, "optimizer": torch.optim.SGD(layer.parameters())}
    with pytest.raises(
        CheckpointError, match=r"^optimizer: .*not belong to the same group in the checkpoint"
    ):
        restore(one_group, tmp_path)


def test_the_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    save({"model": layer, "optimizer": torch.optim.Adam(layer.parameters())}, tmp_path)
    other = {"model": layer, "optimizer": torch.optim.SGD(layer.parameters())}
    with pytest.raises(CheckpointError, match=r"^optimizer: .*SGD has none"):
        restore(other, tmp_path)


def _stepped(make: Callable[[nn.Module], torch.optim.Optimizer]) -> State:
    """Makes a layer, and an optimizer after two steps."""
    layer = nn.Linear(2, 2)
    optimizer = make(layer)
    for _ in range(2):
        layer(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return {"model": layer, "optimizer": optimizer}


def test_a_trained_parameter_that_is_frozen_now_is_refused(tmp_path: Path) -> None:
    save(_stepped(lambda layer: torch.optim.AdamW(layer.parameters())), tmp_path)
    layer = nn.Linear(2, 2)
    layer.weight.requires_grad_(False)
    fresh = {"model": layer, "optimizer": torch.optim.AdamW(layer.parameters())}
    with pytest.raises(
        CheckpointError, match=r"^optimizer: .*: weight .3 tensors stored, 0 present"
    ):
        restore(fresh, tmp_path)


def test_an_untrained_parameter_can_be_frozen_now(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    save({"model": layer, "optimizer": torch.optim.AdamW(layer.parameters())}, tmp_path)
    layer.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(layer.parameters())
    restore({"model": layer, "optimizer": optimizer}, tmp_path)
    assert not optimizer.state


def test_a_state_with_additional_tensors_of_a_parameter_is_refused(tmp_path: Path) -> None:
    save(_stepped(lambda layer: torch.optim.AdamW(layer.parameters(), amsgrad=True)), tmp_path)
    layer = nn.Linear(2, 2)
    fresh = {"model": layer, "optimizer": torch.optim.AdamW(layer.parameters())}
    with pytest.raises(CheckpointError, match=r"bias .4 tensors stored, 3 present., weight .4"):
        restore(fresh, tmp_path)


def test_an_option_that_is_no_longer_a_tensor_is_refused(tmp_path: Path) -> None:
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


def test_a_state_that_has_become_larger_is_refused(tmp_path: Path) -> None:
    save(_lbfgs(0, 6), tmp_path)
    with pytest.raises(
        CheckpointError, match=r"^optimizer: .*weight .23 tensors stored.*PerRank.optimizer"
    ):
        restore(_lbfgs(1, 3), tmp_path)


def test_groups_in_another_order_keep_their_tensor_learning_rates(
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


def test_states_without_their_groups_can_be_loaded(tmp_path: Path) -> None:
    state = _stepped(lambda layer: torch.optim.AdamW(layer.parameters()))
    save(state, tmp_path)
    layer = nn.Linear(2, 2)
    fresh = {"model": layer, "optimizer": torch.optim.AdamW(layer.parameters())}
    restore(fresh, tmp_path, names=["model.*", "optimizer.state.*"])
    expected = state["optimizer"].state_dict()["state"]
    assert_equal(fresh["optimizer"].state_dict()["state"], expected)


def test_a_state_that_the_rank_of_the_options_did_not_have_is_loaded(tmp_path: Path) -> None:
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
