"""torch_ckpt.state.states: the state of optimizers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import torch_ckpt
from tests.programs import OPTIMIZERS, State, kept, program, restore, save
from tests.support import assert_equal
from torch_ckpt import CheckpointError
from torch_ckpt.state.states import States

pytestmark = pytest.mark.usefixtures("without_warnings")


Make = Callable[[nn.Linear], torch.optim.Optimizer]


def adamw(layer: nn.Linear, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(layer.parameters(), **options)


def of_frozen(layer: nn.Linear) -> torch.optim.Optimizer:
    layer.weight.requires_grad_(False)
    return adamw(layer)


def parts(make: Make = adamw, steps: int = 0) -> State:
    """Makes a layer, and an optimizer after some steps."""
    layer = nn.Linear(2, 2)
    optimizer = make(layer)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = (layer(torch.tensor([[1.0, 2.0], [3.0, 5.0]])) - 1).pow(2).sum()
        value.backward()
        return value

    for _ in range(steps):
        optimizer.step(loss)  # type: ignore[arg-type]
    return {"model": layer, "optimizer": optimizer}


def test_saving_before_the_first_step_calls_no_hook_of_the_optimizer() -> None:
    state = program(OPTIMIZERS["AdamW"])
    called: list[str] = []
    state["optimizer"].register_step_post_hook(lambda *_: called.append("its own"))
    handle = register_optimizer_step_post_hook(lambda *_: called.append("all optimizers'"))
    States(state).saved()
    handle.remove()
    assert called == []


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
    state = parts(lambda layer: _Noisy(layer.parameters()))
    before = torch.get_rng_state()
    States(state).saved()
    assert torch.equal(torch.get_rng_state(), before)


def test_frozen_parameters_have_no_state_in_the_checkpoint() -> None:
    found = States(parts(of_frozen)).saved()
    assert set(found["optimizer"]["state"]) == {"bias"}


class _Wide(torch.optim.Optimizer):
    """Optimizer whose state is float32 for any parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["mean"] = torch.full(parameter.shape, 1 / 3)


def test_a_states_dtype_is_kept_if_it_differs_from_the_parameters(tmp_path: Path) -> None:
    def of_bfloat16(layer: nn.Linear) -> torch.optim.Optimizer:
        return _Wide(layer.bfloat16().parameters())

    saved = parts(of_bfloat16)
    saved["optimizer"].step()
    restored = kept(saved, tmp_path, parts(of_bfloat16))
    mean = restored["optimizer"].state[restored["model"].weight]["mean"]
    assert_equal(mean, torch.full((2, 2), 1 / 3))


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


@pytest.mark.parametrize(
    ("modules", "names"),
    [
        (
            {"encoder": nn.Linear(2, 2), "decoder": nn.Linear(2, 2)},
            ["encoder.weight", "encoder.bias", "decoder.weight", "decoder.bias"],
        ),
        (
            {"a": nn.ModuleDict({"b": nn.Linear(2, 2)}), "a.b": nn.Linear(2, 2)},
            ["0", "1", "2", "3"],
        ),
    ],
    ids=["unique names", "duplicate names"],
)
def test_an_optimizer_of_several_modules_names_them_or_has_numbers(
    modules: dict[str, nn.Module], names: list[str]
) -> None:
    parameters = [p for module in modules.values() for p in module.parameters()]
    found = States({**modules, "optimizer": torch.optim.Adam(parameters)}).saved()
    assert list(found["optimizer"]["state"]) == names


def test_an_optimizer_without_a_module_in_the_mapping_is_restored_by_numbers(
    tmp_path: Path,
) -> None:
    saved, fresh = parts(adamw, 2)["optimizer"], parts()["optimizer"]
    kept({"optimizer": saved}, tmp_path, {"optimizer": fresh})
    assert_equal(fresh.state_dict(), saved.state_dict())


def two_groups(layer: nn.Linear) -> torch.optim.Optimizer:
    groups = [{"params": [layer.weight], "lr": 0.1}, {"params": [layer.bias], "lr": 0.2}]
    return torch.optim.SGD(groups)


def sgd(layer: nn.Linear, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(layer.parameters(), **options)


def lbfgs(layer: nn.Linear, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(layer.parameters(), **options)


#: The optimizer that is saved after some steps, the fresh one after some steps, and the error.
REFUSED: dict[str, tuple[Make, int, Make, int, str]] = {
    "other groups": (
        *(two_groups, 0, sgd, 0),
        "In the checkpoint, group 0 has weight; group 1 has bias. Now, group 0 has weight, bias",
    ),
    "another optimizer": (adamw, 0, sgd, 0, "has exp_avg, exp_avg_sq, step, and SGD has no state"),
    "additional tensors": (
        *(partial(adamw, amsgrad=True), 2, adamw, 0),
        "has exp_avg, exp_avg_sq, max_exp_avg_sq, step, and AdamW has exp_avg, exp_avg_sq, step",
    ),
    "an option that is no tensor now": (
        *(partial(sgd, lr=torch.tensor(0.1)), 2, partial(sgd, lr=0.1), 0),
        "lr of group 0 was saved as a tensor",
    ),
    "a state that has become larger": (
        *(partial(lbfgs, max_iter=6), 1, partial(lbfgs, max_iter=3), 1),
        r"weight .23 tensors stored.*PerRank.optimizer",
    ),
    "a state that cannot be made": (lbfgs, 0, lbfgs, 0, r"PerRank\(optimizer\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_state_that_does_not_fit_the_optimizer_is_refused(tmp_path: Path, case: str) -> None:
    saved, saved_steps, fresh, fresh_steps, text = REFUSED[case]
    torch.manual_seed(0)
    save(parts(saved, saved_steps), tmp_path)
    torch.manual_seed(1)
    with pytest.raises(CheckpointError, match=f"optimizer: .*{text}"):
        restore(parts(fresh, fresh_steps), tmp_path)


def test_an_untrained_parameter_can_be_frozen_now(tmp_path: Path) -> None:
    restored = kept(parts(), tmp_path, parts(of_frozen))
    assert not restored["optimizer"].state


def test_a_parameter_frozen_after_training_gets_its_state_back(tmp_path: Path) -> None:
    saved = parts(adamw, 2)
    saved["model"].weight.requires_grad_(False)
    restored = kept(saved, tmp_path, parts(of_frozen))
    assert_equal(restored["optimizer"].state_dict(), saved["optimizer"].state_dict())


def test_a_load_of_some_states_creates_no_others(tmp_path: Path) -> None:
    def nadam(layer: nn.Linear) -> torch.optim.Optimizer:
        return torch.optim.NAdam(layer.parameters())

    torch_ckpt.save(parts(nadam, 2), tmp_path)
    fresh = parts(nadam)
    torch_ckpt.load(fresh, tmp_path, names=["model.*", "*.param_groups.*", "*.weight.*"])
    assert list(fresh["optimizer"].state) == [fresh["model"].weight]


def test_groups_in_another_order_keep_their_tensor_learning_rates(tmp_path: Path) -> None:
    def groups(layer: nn.Linear, *rates: float) -> list[dict[str, Any]]:
        pairs = zip([layer.weight, layer.bias], rates, strict=True)
        return [{"params": [p], "lr": torch.tensor(rate)} for p, rate in pairs]

    save(parts(lambda layer: torch.optim.AdamW(groups(layer, 0.5, 0.25)), 2), tmp_path)
    layer = nn.Linear(2, 2)
    of_weight, of_bias = groups(layer, 0.0, 0.0)
    restore({"model": layer, "optimizer": torch.optim.AdamW([of_bias, of_weight])}, tmp_path)
    assert (of_weight["lr"].item(), of_bias["lr"].item()) == (0.5, 0.25)


def test_states_without_their_groups_can_be_loaded(tmp_path: Path) -> None:
    saved, fresh = parts(adamw, 2), parts()
    save(saved, tmp_path)
    restore(fresh, tmp_path, names=["model.*", "optimizer.state.*"])
    expected = saved["optimizer"].state_dict()["state"]
    assert_equal(fresh["optimizer"].state_dict()["state"], expected)


def test_a_state_that_the_rank_of_the_options_did_not_have_is_loaded(tmp_path: Path) -> None:
    # As with experts, whose parameters have no gradient on some ranks.
    saved, fresh = parts(adamw, 2), parts()
    stored = States(saved).saved()
    of_rank_0 = States(fresh).saved()
    stored["optimizer"]["without_state"] = of_rank_0["optimizer"]["without_state"]
    torch_ckpt.save(stored, tmp_path)
    restore(fresh, tmp_path)
    expected = saved["optimizer"].state_dict()["state"]
    assert_equal(fresh["optimizer"].state_dict()["state"], expected)
