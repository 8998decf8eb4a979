"""Training programs, and the state of them that a checkpoint keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

import torch_ckpt
from torch_ckpt import LoadReport, ReadOptions, RNGState
from torch_ckpt.checkpoint.source import Source
from torch_ckpt.loading.load import load
from torch_ckpt.state.states import States

State = dict[str, Any]
Parameters = Iterator[nn.Parameter]


def save(state: State, path: Path) -> None:
    torch_ckpt.save(state, path)


def restore(state: State, path: Path, **arguments: Any) -> LoadReport:
    """Restores a state as a manager does, which also restores the structure of plain values."""
    source_of = partial(Source, path, arguments.pop("options", ReadOptions()))
    report = load(state, source_of, restores_structure=True, **arguments)
    assert isinstance(report, LoadReport)
    return report


def read_targets(state: State) -> None:
    """Reads the state as before a load."""
    states = States(state)
    for key in state:
        states.read(key, for_load=True)


def kept(state: State, path: Path, fresh: State) -> State:
    """Saves one state, restores it into a fresh one, and returns the latter."""
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
    """Returns all results of training."""
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
