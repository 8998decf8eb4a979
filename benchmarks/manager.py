"""Cost of a CheckpointManager in a training loop: in steps that it does not save, and beyond
async_save in steps that it saves.

A sample has many calls. Before each call the previous save has ended, and all ranks run one
training step and wait for each other, as an exchange of gradients would make them.
"""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import torch_ckpt
from torch_ckpt.saving.save_state import SaveState
from torch_ckpt.state.states import States

from . import ranks, states
from .measure import CallSample, alternate, settle
from .results import ContenderInfo
from .states import State
from .training import Training

_SAMPLES = "manager.json"
_PARAMETERS = 50
_TIMEOUT_SECONDS = 300.0
# With failures so rare, "auto" makes no second save during the measurement.
_MTBF_HOURS = 1e9


@dataclass(frozen=True)
class CallEffort:
    """Numbers of calls in a sample: of `save` in steps that are not saved, and of other calls."""

    steps: int
    others: int


@dataclass(frozen=True)
class _TimedCall:
    """A call to time. `wait` waits, untimed, for the end of the save that the call started."""

    info: ContenderInfo
    call: Callable[[], object]
    wait: Callable[[], object]

    @property
    def in_steps(self) -> bool:
        return self.info.name.startswith("step_")


def contenders(world: int) -> list[ContenderInfo]:
    """Returns the contenders for `world` ranks."""
    of = f"{world} rank{'s' if world > 1 else ''}: "
    infos = [
        ContenderInfo(f"step_{name}_{world}", f"{of}save() in a step not saved, {label}", "ours")
        for name, label in (
            ("number", "interval=N"),
            ("time", "interval=timedelta"),
            ("auto", 'interval="auto"'),
        )
    ]
    infos += [
        ContenderInfo(f"async_{world}", f"{of}async_save of a dict of tensors", "ours"),
        ContenderInfo(f"tensors_{world}", f"{of}save() of the dict of tensors", "ours"),
        ContenderInfo(f"modules_{world}", f"{of}save() of model and optimizer", "ours"),
        ContenderInfo(f"state_{world}", f"{of}read of the states of these", "ours"),
    ]
    if world > 1:
        infos.append(ContenderInfo(f"replicas_{world}", f"{of}check_replicas", "ours"))
    return infos


def measure(
    world: int, state_bytes: int, effort: CallEffort, *, rounds: int, directory: Path
) -> list[CallSample]:
    """Times all contenders alternately on `world` ranks. `directory` must be empty."""
    ranks.run(world, partial(_measure, world, state_bytes, effort, rounds, directory))
    return [CallSample(**entry) for entry in json.loads((directory / _SAMPLES).read_text())]


def _measure(
    world: int, state_bytes: int, effort: CallEffort, rounds: int, directory: Path
) -> None:
    training = Training()
    with _entries(world, state_bytes, directory) as entries:
        for entry in entries:
            # Warm up imports, thread pools and memory.
            _seconds_of_calls(entry, 2, training)
        own = []
        for round_index, position, entry in alternate(entries, rounds):
            settle()
            calls = effort.steps if entry.in_steps else effort.others
            cpu = time.process_time()
            seconds = _seconds_of_calls(entry, calls, training)
            middle = statistics.fmean if entry.in_steps else statistics.median
            own.append(
                CallSample(
                    contender=entry.info.name,
                    round=round_index,
                    position=position,
                    wall_s=middle(seconds),
                    cpu_s=(time.process_time() - cpu) / calls,
                    bytes=state_bytes,
                    calls=calls,
                )
            )
    by_rank: list[Any] = [None] * world
    dist.all_gather_object(by_rank, own)
    if dist.get_rank() == 0:
        slowest = [
            max(of_ranks, key=lambda sample: sample.wall_s)
            for of_ranks in zip(*by_rank, strict=True)
        ]
        (directory / _SAMPLES).write_text(json.dumps([asdict(sample) for sample in slowest]))


def _seconds_of_calls(entry: _TimedCall, calls: int, training: Training) -> list[float]:
    seconds = []
    for _ in range(calls):
        training.step()
        dist.barrier()
        begun = time.perf_counter()
        entry.call()
        seconds.append(time.perf_counter() - begun)
        entry.wait()
    return seconds


# --- the calls to time ---------------------------------------------------------------------------


def _build_modules(state_bytes: int) -> dict[str, Any]:
    """Builds a model and its optimizer, with four tensors for each parameter."""
    generator = torch.Generator().manual_seed(0)
    rows = max(1, state_bytes // (3 * _PARAMETERS * 256 * 4))
    model = nn.ParameterDict(
        {f"{i}": torch.rand((rows, 256), generator=generator) for i in range(_PARAMETERS)}
    )
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@contextmanager
def _entries(world: int, state_bytes: int, directory: Path) -> Iterator[list[_TimedCall]]:
    modules = _build_modules(state_bytes)
    tensors: State = {
        f"{number}": tensor for number, tensor in enumerate(states.tensors(States(modules).saved()))
    }
    infos = {info.name.rpartition("_")[0]: info for info in contenders(world)}
    calls: dict[str, Callable[[], object]] = {
        "state": lambda: States(modules).saved(),
        "replicas": lambda: SaveState(tensors).fingerprints("error"),
    }
    waits: dict[str, Callable[[], object]] = {}
    with ExitStack() as stack:

        def manager(name: str, **options: Any) -> torch_ckpt.CheckpointManager:
            return stack.enter_context(
                torch_ckpt.CheckpointManager(directory / name, keep=2, **options)
            )

        for name, interval in (
            ("step_number", 10**9),
            ("step_time", timedelta(days=1)),
            ("step_auto", torch_ckpt.manager.AutoInterval(mtbf_hours=_MTBF_HOURS)),
        ):
            steps = _UnsavedSteps(manager(name, interval=interval), modules)
            if name == "step_auto":
                steps.save_first()
            calls[name] = steps.skip_step
        for name, state in (("tensors", tensors), ("modules", modules)):
            saves = _ManagerSaves(manager(name), state)
            calls[name], waits[name] = saves.call, saves.wait
        async_saves = _AsyncSaves(directory / "async", tensors)
        calls["async"], waits["async"] = async_saves.call, async_saves.wait
        yield [
            _TimedCall(info, calls[name], waits.get(name, lambda: None))
            for name, info in infos.items()
        ]


class _UnsavedSteps:
    """Steps that a manager does not save."""

    def __init__(self, manager: torch_ckpt.CheckpointManager, state: dict[str, Any]) -> None:
        self._manager = manager
        self._state = state
        self._step = 0

    def save_first(self) -> None:
        """Makes the save from which "auto" computes its interval."""
        self._step += 1
        self._manager.save(self._step, self._state)
        self._manager.wait_until_finished()

    def skip_step(self) -> None:
        self._step += 1
        if self._manager.save(self._step, self._state):
            raise RuntimeError(f"the manager saved step {self._step}, which it should skip")


class _ManagerSaves:
    """Saves through a manager, which makes a directory for each."""

    def __init__(self, manager: torch_ckpt.CheckpointManager, state: dict[str, Any]) -> None:
        self._manager = manager
        self._state = state
        self._step = 0

    def call(self) -> None:
        self._step += 1
        self._manager.save(self._step, self._state)

    def wait(self) -> None:
        self._manager.wait_until_finished()


class _AsyncSaves:
    """Saves by async_save without a manager."""

    def __init__(self, path: Path, state: State) -> None:
        self._path = path
        self._state = state
        self._handle: torch_ckpt.AsyncSave | None = None

    def call(self) -> None:
        self._handle = torch_ckpt.async_save(self._state, self._path)

    def wait(self) -> None:
        assert self._handle is not None
        self._handle.result()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self._path)
        dist.barrier()
