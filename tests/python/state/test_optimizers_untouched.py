"""Reads, saves and restores of an optimizer's state change neither the optimizer nor its model."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import torch_ckpt
from tests.programs import State, read_targets, restore, save
from tests.support import assert_equal, pairwise
from torch_ckpt import PerRank
from torch_ckpt.state.states import States

pytestmark = pytest.mark.filterwarnings("error", "ignore:torch.distributed is disabled")

Groups = Iterable[Any]
Make = Callable[[Groups], Optimizer]

#: Arguments of every optimizer of torch; those with a mapping need a PerRank.
CLASSES: dict[str, Make] = {
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.1),
    "Adam": lambda p: torch.optim.Adam(p, weight_decay=0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, weight_decay=0.1),
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "LBFGS": lambda p: torch.optim.LBFGS([q for group in p for q in group["params"]], max_iter=3),
    "Muon": torch.optim.Muon,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "SGD": lambda p: torch.optim.SGD(p, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "SparseAdam": torch.optim.SparseAdam,
}
#: LBFGS has one group, and a step without a closure fails; SparseAdam refuses dense gradients.
#: Neither has a state that a step with a gradient of zeros would make.
NEEDS_PER_RANK = ("LBFGS", "SparseAdam")


class Delegating(Optimizer):
    """Returns another optimizer's containers from properties, as Accelerate's wrapper does."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner

    state = property(  # type: ignore[assignment]
        lambda self: self.inner.state, lambda self, state: setattr(self.inner, "state", state)
    )
    param_groups = property(  # type: ignore[assignment]
        lambda self: self.inner.param_groups,
        lambda self, groups: setattr(self.inner, "param_groups", groups),
    )
    defaults = property(lambda self: self.inner.defaults)  # type: ignore[assignment]

    def state_dict(self) -> State:
        return self.inner.state_dict()

    def load_state_dict(self, state: State) -> None:
        self.inner.load_state_dict(state)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step(closure)


class Sharing(Optimizer):
    """Has the same containers as another optimizer, as attributes."""

    def __init__(self, inner: Optimizer) -> None:
        self.base_optimizer = inner
        self.share()

    def share(self) -> None:
        inner = self.base_optimizer
        self.state, self.param_groups = inner.state, inner.param_groups
        self.defaults = inner.defaults

    def state_dict(self) -> State:
        return self.base_optimizer.state_dict()

    def load_state_dict(self, state: State) -> None:
        self.base_optimizer.load_state_dict(state)
        self.share()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base_optimizer.step(closure)


def accelerated(optimizer: Optimizer) -> Optimizer:
    accelerate = pytest.importorskip("accelerate")
    accelerate.Accelerator(cpu=True)  # its wrapper needs the state that this makes
    wrapped: Optimizer = accelerate.optimizer.AcceleratedOptimizer(optimizer)
    return wrapped


WRAPPERS: dict[str, Callable[[Optimizer], Optimizer]] = {
    "plain": lambda optimizer: optimizer,
    "Accelerate": accelerated,
    "delegating": Delegating,
    "delegating twice": lambda optimizer: Delegating(Delegating(optimizer)),
    "sharing": Sharing,
}


def program(
    name: str, wrap: str = "plain", *, unused: bool = False, seed: int = 0
) -> dict[str, Any]:
    """Makes two groups with their own options; tables of rows, because Muon accepts only
    matrices."""
    torch.manual_seed(seed)
    names = ["first", "second", *(["unused"] if unused else [])]
    is_sparse = name == "SparseAdam"
    model = nn.ModuleDict({k: nn.Embedding(4, 3, sparse=is_sparse) for k in names})
    first, *others = model.parameters()
    groups = [{"params": [first]}, {"params": others, "lr": 0.25}]
    optimizer = WRAPPERS[wrap](CLASSES[name](groups))
    return {
        "model": model,
        "optimizer": PerRank(optimizer) if name in NEEDS_PER_RANK else optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(_inner(optimizer), 2),
    }


def _inner(optimizer: Optimizer) -> Optimizer:
    for name in ("optimizer", "inner", "base_optimizer"):
        if hasattr(optimizer, name):
            return _inner(getattr(optimizer, name))
    return optimizer


def optimizer_of(state: State) -> Optimizer:
    found: Any = state["optimizer"]
    return found.value if isinstance(found, PerRank) else found


def train(state: State, steps: int) -> None:
    optimizer, model = optimizer_of(state), state["model"]
    rows = torch.tensor([[0, 2, 3]])

    def loss() -> torch.Tensor:
        for parameter in model.parameters():
            parameter.grad = None
        total = (model["first"](rows) + model["second"](rows)).sub(1).square().sum()
        total.backward()
        return total

    for _ in range(steps):
        if isinstance(_inner(optimizer), torch.optim.LBFGS):
            optimizer.step(loss)  # type: ignore[arg-type]
        else:
            loss()
            optimizer.step()
        state["scheduler"].step()


def picture(*values: Any, identity: bool) -> Any:
    """Returns all that values contain, bit for bit.

    Args:
        identity: include the identities of containers and tensors, and the versions of tensors.
    """

    def of(value: Any) -> Any:
        same = id(value) if identity else None
        if isinstance(value, torch.Tensor):
            dense = value.detach().to_dense().clone()
            written = value._version if identity and not value.is_inference() else None
            grad = of(value.grad) if value.is_leaf else None
            return (same, value.dtype, value.requires_grad, written, dense.tolist(), grad)
        if isinstance(value, dict):
            items = enumerate(value.items())
            return same, [
                (n if isinstance(k, torch.Tensor) else k, of(part)) for n, (k, part) in items
            ]
        if isinstance(value, (list, tuple)):
            return same, type(value), [of(part) for part in value]
        if isinstance(value, PerRank):
            return same, of(value.value)
        if isinstance(value, Optimizer):
            return same, type(value), of(vars(value))
        if isinstance(value, nn.Module):
            own = {k: v for k, v in vars(value).items() if k not in ("_modules", "_parameters")}
            return same, of(value._parameters), of(value._modules), list(own)
        return value if isinstance(value, (int, float, str, bool)) else repr(type(value))

    return [of(value) for value in values]


def outcome(state: State) -> State:
    return {
        "model": state["model"].state_dict(),
        "optimizer": optimizer_of(state).state_dict(),
        "scheduler": state["scheduler"].state_dict(),
    }


#: Pairs of a class, a wrapper, whether a parameter is unused, and steps before the save.
each_case = pytest.mark.parametrize(
    ("name", "wrap", "unused", "before"),
    pairwise(itertools.product(CLASSES, WRAPPERS, [False, True], [0, 2])),
)
each_wrapper = pytest.mark.parametrize("wrap", WRAPPERS)


def test_every_optimizer_of_torch_is_covered() -> None:
    found = inspect.getmembers(torch.optim, inspect.isclass)
    of_torch = {name for name, kind in found if issubclass(kind, Optimizer)} - {"Optimizer"}
    assert of_torch == set(CLASSES)


@each_case
def test_restoring_the_current_state_changes_no_value(
    tmp_path: Path, name: str, wrap: str, unused: bool, before: int
) -> None:
    state = program(name, wrap, unused=unused)
    train(state, before)
    # torch's own function adds a default and has options in another order.
    optimizer_of(state).load_state_dict(optimizer_of(state).state_dict())
    expected = picture(state["model"], state["optimizer"], identity=False)
    save(state, tmp_path)
    restore(state, tmp_path)
    assert picture(state["model"], state["optimizer"], identity=False) == expected


@each_case
def test_a_save_changes_no_attribute_and_training_resumed_from_it_equals_an_uninterrupted_one(
    tmp_path: Path, name: str, wrap: str, unused: bool, before: int
) -> None:
    through = program(name, wrap, unused=unused)
    train(through, before + 3)
    interrupted = program(name, wrap, unused=unused)
    train(interrupted, before)
    expected = picture(interrupted["model"], interrupted["optimizer"], identity=True)
    read_targets(interrupted)
    save(interrupted, tmp_path)
    assert picture(interrupted["model"], interrupted["optimizer"], identity=True) == expected
    resumed = program(name, wrap, unused=unused, seed=1)
    restore(resumed, tmp_path)
    for state in (resumed, interrupted):
        train(state, 3)
        assert_equal(outcome(state), outcome(through))


@pytest.mark.parametrize("wrap", ["Accelerate", "delegating", "sharing"])
def test_a_wrapper_and_its_optimizer_restore_the_states_of_each_other(
    tmp_path: Path, wrap: str
) -> None:
    for saved, fresh in ((wrap, "plain"), ("plain", wrap)):
        state, restored = program("AdamW", saved), program("AdamW", fresh, seed=1)
        train(state, 2)
        save(state, tmp_path / saved)
        restore(restored, tmp_path / saved)
        assert_equal(outcome(restored), outcome(state))


class Holding(Optimizer):
    """Has its own state, and steps another optimizer of the same parameters, as SAM does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["before"] = parameter.detach().clone()
        self.base.step()


class Remembering(Optimizer):
    """Steps the parameters in its own attribute instead of those of its groups."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.all = self.param_groups[0]["params"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.all:
            self.state[parameter]["steps"] = torch.ones(())
            parameter.sub_(parameter.grad)


class Counting(Optimizer):
    """Appends to its own list when it steps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "history": [0]})
        self.steps: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps.append(1)
        for group in self.param_groups:
            group["history"].append(1)
            for parameter in group["params"]:
                self.state[parameter]["mean"] = torch.zeros_like(parameter)


@pytest.mark.parametrize("make", [Holding, Remembering, Counting])
def test_attributes_beside_the_groups_are_not_stepped(make: Make) -> None:
    layer = nn.Linear(2, 2)
    optimizer = make(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    expected = picture(layer, optimizer, identity=True)
    States({"model": layer, "optimizer": optimizer}).saved()
    assert picture(layer, optimizer, identity=True) == expected


def test_an_attribute_that_the_state_depends_on_is_used(tmp_path: Path) -> None:
    class WithMean(Optimizer):
        def __init__(self, parameters: Any, kinds: tuple[str, ...]) -> None:
            super().__init__(parameters, {"lr": 0.1})
            self.kinds = kinds

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                for kind in self.kinds:
                    self.state[parameter][kind] = torch.full_like(parameter, 2)

    saved, fresh = (
        {"optimizer": WithMean([nn.Parameter(torch.ones(2))], ("mean", "peak"))} for _ in range(2)
    )
    saved["optimizer"].step()
    save(saved, tmp_path)
    restore(fresh, tmp_path)
    assert_equal(fresh["optimizer"].state_dict(), saved["optimizer"].state_dict())


@each_wrapper
def test_an_overlapped_save_blocks_the_next_step_of_a_wrapped_optimizer(
    tmp_path: Path, wrap: str
) -> None:
    state = program("AdamW", wrap)
    train(state, 1)
    expected = {name: value.clone() for name, value in state["model"].state_dict().items()}
    handle = torch_ckpt.async_save({"model": state["model"]}, tmp_path, staging="overlapped")
    handle.guard(optimizer_of(state))
    train(state, 1)
    handle.result()
    restore({"model": state["model"]}, tmp_path)
    assert_equal(state["model"].state_dict(), expected)
