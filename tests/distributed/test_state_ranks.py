"""The state of a program on ranks, and checkpoints of other numbers of ranks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import torch_ckpt
from tests.distributed.cases import Launch, mesh_1d
from tests.distributed.launcher import between, on, on_ranks
from tests.programs import restore, save
from tests.support import assert_equal
from torch_ckpt import AsyncCheckpoint, CheckpointError, PerRank, RNGState
from torch_ckpt.state.states import States
from torch_ckpt.training.async_checkpoint import AsyncCheckpointOptions

State = dict[str, Any]

# --- programs ------------------------------------------------------------------------------------


def fsdp(module: nn.Module, launch: Launch) -> nn.Module:
    for layer in module:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh_1d(launch))
    return fully_shard(module, mesh=mesh_1d(launch))


def tensor_parallel(module: nn.Module, launch: Launch) -> nn.Module:
    plan = {"0": ColwiseParallel(), "3": RowwiseParallel()}
    return parallelize_module(module, mesh_1d(launch), plan)


WRAPS: dict[str, Callable[[nn.Module, Launch], nn.Module]] = {
    "ddp": lambda module, launch: DistributedDataParallel(module),
    "compiled ddp": lambda module, launch: torch.compile(DistributedDataParallel(module)),
    "fsdp": fsdp,
    "tp": tensor_parallel,
}


def program(wrap: str, launch: Launch, seed: int = 0) -> State:
    torch.manual_seed(seed)
    # No number of ranks divides these rows evenly.
    layers = nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 5, bias=wrap != "tp")
    module = WRAPS[wrap](nn.Sequential(*layers), launch)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    # Each rank has its own dropout, unless ranks hold parts of one layer.
    torch.manual_seed(seed + (0 if wrap == "tp" else launch.rank))
    return {
        "model": module,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "steps": 0,
        "rng": RNGState(),
    }


def train(state: State, steps: int) -> None:
    # Without the compiler, which takes longer than everything else.
    module = getattr(state["model"], "_orig_mod", state["model"])
    for _ in range(steps):
        module(torch.randn(6, 4)).square().mean().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["scheduler"].step()
        state["steps"] += 1


def gather_full(state: State) -> State:
    """Returns torch's own full state of a program, identical on all ranks."""
    options = StateDictOptions(full_state_dict=True)
    module, optimizer = get_state_dict(state["model"], state["optimizer"], options=options)
    optimizer["state"] = dict(sorted(optimizer["state"].items()))
    scheduler = state["scheduler"].state_dict()
    return {"model": module, "optimizer": optimizer, "scheduler": scheduler, "n": state["steps"]}


# --- modules and optimizers ----------------------------------------------------------------------


def case_names_are_those_of_torch_and_shards_are_dtensors(launch: Launch) -> None:
    for wrap in WRAPS:
        state = program(wrap, launch)
        train(state, 1)
        module, optimizer = get_state_dict(state["model"], state["optimizer"])
        found = States(state).saved()
        assert set(found["model"]) == set(module), wrap
        assert set(found["optimizer"]["state"]) == set(optimizer["state"]), wrap
        is_sharded = wrap in ("fsdp", "tp")
        exp_avg = found["optimizer"]["state"]["0.weight"]["exp_avg"]
        assert isinstance(found["model"]["0.weight"], DTensor) is is_sharded, wrap
        assert isinstance(exp_avg, DTensor) is is_sharded, wrap


def case_training_continues_bit_for_bit_after_a_restore(launch: Launch) -> None:
    for wrap in WRAPS:
        for before in (0, 2):
            state = program(wrap, launch)
            train(state, before)
            save(state, launch.path(wrap, str(before)))
            resumed = program(wrap, launch, seed=1)
            # DDP changes its buckets, and so the order of additions, after the first step.
            train(resumed, before)
            restore(resumed, launch.path(wrap, str(before)))
            drawn = RNGState().state_dict()
            train(resumed, 2)
            torch.set_rng_state(drawn["torch"])
            train(state, 2)
            assert_equal(gather_full(resumed), gather_full(state), f"{wrap} {before}")


def grouped(wrap: str, launch: Launch, *groups: str, seed: int = 0) -> State:
    """Makes a program whose optimizer has a group for each text of parameter names."""
    model = program(wrap, launch, seed)["model"]
    named = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(
        [
            {"params": [named[name] for name in names.split()], "lr": 0.1 * number}
            for number, names in enumerate(groups, 1)
        ]
    )
    return {"model": model, "optimizer": optimizer}


def local_parts(tensors: State) -> State:
    return {name: getattr(tensor, "_local_tensor", tensor) for name, tensor in tensors.items()}


def case_parameter_groups_are_compared_before_any_rank_loads(launch: Launch) -> None:
    body, head = "0.weight 0.bias", "3.weight 3.bias"
    for wrap in ("ddp", "fsdp"):
        state = grouped(wrap, launch, body, head)
        state["model"](torch.randn(6, 4)).square().mean().backward()
        state["optimizer"].step()
        torch_ckpt.save(state, launch.path(wrap))
        is_last = launch.rank == launch.size - 1
        groups = [*body.split(), head] if is_last else [body, head]
        other = grouped(wrap, launch, *groups, seed=1)
        before = copy.deepcopy(local_parts(other["model"].state_dict()))
        with pytest.raises(CheckpointException, match=r"Now, group 0 has 0.weight; group 1 has 0."):
            torch_ckpt.load(other, launch.path(wrap))
        assert_equal(local_parts(other["model"].state_dict()), before)
        resumed = grouped(wrap, launch, head, body, seed=1)
        for parameter in resumed["optimizer"].param_groups[0]["params"]:
            parameter.requires_grad_(False)  # frozen after training
        torch_ckpt.load(resumed, launch.path(wrap))
        assert [group["lr"] for group in resumed["optimizer"].param_groups] == [0.2, 0.1]
        found, expected = (
            local_parts(
                {
                    name: of["optimizer"].state[parameter]["exp_avg"]
                    for name, parameter in of["model"].named_parameters()
                }
            )
            for of in (resumed, state)
        )
        assert_equal(found, expected, wrap)


def case_a_program_is_saved_and_loaded_by_hand(launch: Launch) -> None:
    for wrap, other in [*zip(WRAPS, WRAPS, strict=True), ("ddp", "fsdp"), ("fsdp", "ddp")]:
        if other.startswith("compiled"):
            continue
        path = launch.path(wrap, other)
        state = program(wrap, launch)
        train(state, 2)
        torch_ckpt.save(state, path)
        for options in ({}, {"free_before_read": True}):
            resumed = program(other, launch, seed=1)
            torch_ckpt.load(resumed, path, **options)
            assert_equal(gather_full(resumed), gather_full(state), f"{wrap} as {other} {options}")


def case_ddp_names_in_the_dcp_layout_are_refused_by_name(launch: Launch) -> None:
    state = program("ddp", launch)
    dcp.save({"model": state["model"]}, checkpoint_id=launch.path("ckpt"))
    with pytest.raises(CheckpointException, match=r"missing.*\n? *model\.0\.weight"):
        torch_ckpt.load({"model": state["model"]}, launch.path("ckpt"))
    before = {name: value.clone() for name, value in state["model"].state_dict().items()}
    for value in state["model"].state_dict().values():
        value.zero_()
    renamed = {"model.module.*": "model.*"}
    torch_ckpt.load({"model": state["model"]}, launch.path("ckpt"), rename=renamed)
    assert_equal(dict(state["model"].state_dict()), before)


def case_saving_before_the_first_step_changes_nothing(launch: Launch) -> None:
    for wrap in WRAPS:
        undisturbed = program(wrap, launch)
        train(undisturbed, 2)
        saved = program(wrap, launch)
        States(saved).saved()
        train(saved, 2)
        assert_equal(gather_full(saved), gather_full(undisturbed), wrap)


@on(only=True)
def case_a_program_is_saved_for_other_numbers_of_ranks(launch: Launch) -> None:
    for wrap in WRAPS:
        state = program(wrap, launch)
        train(state, 2)
        save(state, launch.path(wrap, "checkpoint"))
        expected = gather_full(state)
        if launch.rank == 0:
            torch.save(expected, launch.path(wrap, "expected"))
    save({"own": PerRank({"position": launch.rank})}, launch.path("own"))


@on(only=True)
def case_a_program_of_another_number_of_ranks_is_restored(launch: Launch) -> None:
    for left in launch.workdir.glob("*-ranks/a_program_is_saved_for_other_numbers_of_ranks"):
        ranks = int(left.parent.name.partition("-")[0])
        wraps = ["ddp", "fsdp", "tp"]
        pairs = [(wrap, wrap) for wrap in wraps] + [("fsdp", "ddp"), ("ddp", "fsdp")]
        for saved, wrap in pairs:
            state = program(wrap, launch, seed=1)
            restore(state, left / saved / "checkpoint")
            expected = torch.load(left / saved / "expected", weights_only=False)
            assert_equal(gather_full(state), expected, f"{saved} as {wrap}")
        own: State = {"own": PerRank({"position": -1})}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            restore(own, left / "own")
        messages = [str(w.message) for w in caught if "keeps its current state" in str(w.message)]
        has_own = launch.rank < ranks
        assert own["own"].value == {"position": launch.rank if has_own else -1}
        assert len(messages) == (0 if has_own else 1)
        assert all(
            f"own: the checkpoint has no state for rank {launch.rank}," in text for text in messages
        )


# --- stock torch ---------------------------------------------------------------------------------


def case_shards_saved_by_stock_torch_are_restored(launch: Launch) -> None:
    for flatten in (False, True):
        path = launch.path(str(flatten))
        saved = program("fsdp", launch)
        train(saved, 2)
        options = StateDictOptions(flatten_optimizer_state_dict=flatten)
        module, optimizer = get_state_dict(saved["model"], saved["optimizer"], options=options)
        stock = {**saved, "model": module, "optimizer": optimizer}
        del stock["rng"]
        dcp.save(stock, checkpoint_id=path)
        for wrap in ("fsdp", "ddp"):
            state = program(wrap, launch, seed=1)
            state["optimizer"].param_groups[0]["lr"] = 7.0
            del state["rng"]
            restore(state, path)
            assert_equal(gather_full(state), gather_full(saved), f"{wrap} {flatten}")


def case_stock_torch_loads_the_saved_shards(launch: Launch) -> None:
    saved = program("fsdp", launch)
    train(saved, 2)
    save(saved, launch.path("ckpt"))
    for wrap in ("fsdp", "ddp"):
        state = program(wrap, launch, seed=1)
        module, optimizer = get_state_dict(state["model"], state["optimizer"])
        dcp.load({"model": module, "optimizer": optimizer}, checkpoint_id=launch.path("ckpt"))
        set_state_dict(
            state["model"], state["optimizer"], model_state_dict=module, optim_state_dict=optimizer
        )
        found, expected = gather_full(state), gather_full(saved)
        assert_equal(
            [found["model"], found["optimizer"]], [expected["model"], expected["optimizer"]]
        )


# --- AsyncCheckpoint -----------------------------------------------------------------------------


def case_a_background_save_is_restored(launch: Launch) -> None:
    for wrap in ("ddp", "fsdp"):
        checkpoint = AsyncCheckpoint(**program(wrap, launch))
        state = checkpoint.state
        paths, committed = [], []
        for _ in range(2):
            train(state, 1)
            paths.append(checkpoint.save(launch.path(wrap), on_commit=committed.append))
            expected = copy.deepcopy(gather_full(state))
        train(state, 1)
        assert paths == [f"{launch.path(wrap)}-1", f"{launch.path(wrap)}-2"]
        checkpoint.sync()
        # Callbacks run only on the coordinator.
        assert committed == ([] if launch.rank else paths)
        dist.barrier()
        resumed = AsyncCheckpoint(**program(wrap, launch, seed=1))
        resumed.restore(paths[1])
        assert resumed.save_counter == 2
        assert_equal(gather_full(resumed.state), expected, wrap)


class _Versioned(nn.Linear):
    """Layer that doubles its weight when it loads a state without a version."""

    _version = 2

    def _load_from_state_dict(
        self, state: State, prefix: str, metadata: State, *others: Any
    ) -> None:
        if metadata.get("version") != 2:
            state[f"{prefix}weight"] = 2 * state[f"{prefix}weight"]
        super()._load_from_state_dict(state, prefix, metadata, *others)


def case_wrapped_modules_do_not_migrate_a_state_of_their_own_version(launch: Launch) -> None:
    for wrap, wrapped in WRAPS.items():
        torch.manual_seed(0)
        layers = [_Versioned(4, 8), nn.ReLU(), nn.BatchNorm1d(8), _Versioned(8, 5, bias=False)]
        module = wrapped(nn.Sequential(*layers), launch)
        before = copy.deepcopy(dict(module.state_dict()))
        torch_ckpt.save({"model": module}, launch.path(wrap))
        torch_ckpt.load({"model": module}, launch.path(wrap))
        assert_equal(_local(module.state_dict()), _local(before), wrap)


def _local(state: State) -> State:
    return {k: v.to_local() if isinstance(v, DTensor) else v for k, v in state.items()}


class _Tracker:
    """Stateful whose state is its value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> State:
        return {"value": self.value}

    def load_state_dict(self, state: State) -> None:
        self.value = state["value"]


def case_states_are_restored_with_the_structure_that_was_saved(launch: Launch) -> None:
    value = {"best": torch.tensor(0.5), "history": [torch.ones(2), torch.ones(3)]}
    own = [torch.full((launch.rank + 1,), float(launch.rank))] * (launch.rank + 1)
    torch_ckpt.save({"all": _Tracker(value), "own": PerRank(_Tracker(own))}, launch.path("ckpt"))
    for fresh in (None, {"best": float("inf"), "history": []}, [torch.ones(1)] * 3):
        everyone, per_rank = _Tracker(fresh), _Tracker(fresh)
        torch_ckpt.load({"all": everyone, "own": PerRank(per_rank)}, launch.path("ckpt"))
        assert_equal(everyone.value, value)
        assert_equal(per_rank.value, own)


@on(2, 4)
def case_a_sharded_tensor_that_the_state_lacks_is_named(launch: Launch) -> None:
    module = fsdp(nn.Sequential(nn.Linear(4, 8)), launch)
    torch_ckpt.save({"ema": _Tracker({"w": module[0].weight})}, launch.path("ckpt"))
    with pytest.raises(CheckpointException, match=r"ema\.value\.w was saved as a sharded tensor"):
        torch_ckpt.load({"ema": _Tracker(None)}, launch.path("ckpt"))
    # A value that is not selected need not fit.
    torch_ckpt.save({"ema": _Tracker({"w": module[0].weight}), "n": 1}, launch.path("selected"))
    state: State = {"ema": _Tracker(None), "n": 0}
    torch_ckpt.load(state, launch.path("selected"), names=["n"])
    assert state["n"] == 1
    torch_ckpt.save({"best": {"w": module[0].weight}}, launch.path("plain"))
    for value in (None, 0.0):
        plain: State = {"best": {"w": value}}
        with pytest.raises(CheckpointException, match=r"best\.w was saved as a sharded tensor"):
            torch_ckpt.load(plain, launch.path("plain"))
        assert plain == {"best": {"w": value}}


class _FailsOnTheLastRank:
    """Stateful that does its part in collectives, but fails in one method on the last rank."""

    def __init__(self, launch: Launch) -> None:
        self._is_last = launch.rank == launch.size - 1
        self.failing = ""

    def state_dict(self) -> State:
        self._fail("state_dict")
        return {"a": 1}

    def load_state_dict(self, state: State) -> None:
        self._fail("load_state_dict")

    def _fail(self, method: str) -> None:
        if self._is_last and method == self.failing:
            raise RuntimeError("the worker has died")


def case_a_save_or_restore_that_fails_on_one_rank_raises_on_all(launch: Launch) -> None:
    value = _FailsOnTheLastRank(launch)
    options = AsyncCheckpointOptions(timeout=60.0)
    checkpoint = AsyncCheckpoint(options, w=torch.ones(3), value=value)
    handle = checkpoint.before_save(lambda: value._fail("hook"))

    def save_and_wait() -> str:
        path = checkpoint.save(launch.path("ckpt"))
        checkpoint.sync()
        return path

    value.failing = "hook"
    # Raised by the call on that rank, and at the end on the others.
    with pytest.raises((RuntimeError, CheckpointException), match="worker has died"):
        save_and_wait()
    handle.remove()
    path = save_and_wait()
    assert path == f"{launch.path('ckpt')}-2"
    for method in ("state_dict", "load_state_dict"):
        value.failing = method
        with pytest.raises((CheckpointError, RuntimeError), match=r"value: .*worker has died"):
            checkpoint.restore(path)
    value.failing = ""
    checkpoint.restore(path)


test_on_ranks = on_ranks(globals(), (1, 2, 4))
test_programs_of_other_numbers_of_ranks_are_restored = between(
    "a_program_is_saved_for_other_numbers_of_ranks",
    "a_program_of_another_number_of_ranks_is_restored",
    [(2, 1), (2, 4), (4, 1), (4, 2)],
)
