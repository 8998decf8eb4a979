"""Background saves by several ranks.

Cases that need a save at some point block it there: at "engine begins" before the first tensor is
read, at "files are written" before the commit.
"""

from __future__ import annotations

import copy
import errno
import threading
import warnings
from concurrent.futures import wait as wait_for_futures
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import torch_ckpt
from tests.distributed import cases
from tests.distributed.background import (
    LOADS,
    STAGINGS,
    assert_saved,
    overwrite,
    threads_in_collectives,
)
from tests.distributed.cases import (
    PATIENCE_SECONDS,
    Launch,
    StateDict,
    assert_is_full_disk,
    everything,
    failure_of,
    full_disk_on,
    full_state,
    full_state_loaded,
    tensor_of,
    trained_model,
)
from tests.distributed.launcher import on, on_ranks
from tests.fault_hooks import at_fault_points, calling, failing, held
from tests.support import assert_equal, emptied, no_warnings
from torch_ckpt import CheckpointError, OnCommitFailed, SourceChanged, WriteOptions

# --- replicas that differ -------------------------------------------------------------------------


def by_save(state: StateDict, path: Path, **options: Any) -> None:
    torch_ckpt.save(state, path, **options)


def by_async_save(state: StateDict, path: Path, **options: Any) -> None:
    torch_ckpt.async_save(state, path, **options).result()


def drifted(launch: Launch) -> StateDict:
    """Makes tensors that only the last rank has changed, and others that are identical on all
    ranks."""
    large = torch.zeros(1 << 20)
    private = launch.rank == launch.size - 1
    return {
        "same": {"large": large.clone(), "small": torch.ones(3), "number": torch.tensor(1)},
        "large": large + private,
        "transposed": (torch.zeros(1000, 1000) + private).t()
        if private
        else torch.zeros(1000, 1000),
        "small": torch.ones(3, dtype=torch.bfloat16) + private,
        f"of rank {launch.rank}": torch.full((4,), launch.rank),
    }


@on(4)
def case_tensors_that_differ_between_ranks_are_warned_of(launch: Launch) -> None:
    for number, save in enumerate((by_save, by_async_save, by_async_save)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            save(drifted(launch), launch.path(str(number)))
            dist.barrier()
        messages = [str(w.message) for w in caught if "one rank's values are" in str(w.message)]
        assert len(messages) == (1 if launch.rank == 0 else 0)
        if not messages:
            continue
        assert f"rank {launch.size - 1} another" in messages[0]
        assert "3 values differ between ranks" in messages[0]
        assert all(f"{name}: rank" in messages[0] for name in ("large", "transposed", "small"))
        assert "same" not in messages[0]


def case_tensors_that_differ_between_ranks_are_refused_on_request(launch: Launch) -> None:
    path = launch.path()
    state = {"large": torch.zeros(1 << 20)}
    # Between the stripes that a save checks by default.
    state["large"][5000] = launch.rank
    for save in (by_save, by_async_save):
        causes = failure_of(launch, lambda save=save: save(state, path, check_replicas="error"))
        assert "large: rank" in str(causes[0])
        assert isinstance(causes[0], CheckpointError)
    assert not list(Path(path).glob("*.distcp"))


def case_equal_or_unchecked_replicas_cause_no_warning(launch: Launch) -> None:
    shard = DTensor.from_local(
        torch.full((2,), launch.rank), cases.mesh_1d(launch), [Shard(0)], run_check=False
    )
    with no_warnings():
        for save in (by_save, by_async_save):
            save({"a": torch.ones(9), "shard": shard}, launch.path(save.__name__))
            save(drifted(launch), launch.path(f"{save.__name__}-off"), check_replicas="off")


# --- what is saved --------------------------------------------------------------------------------


@on(2, 4)
def case_a_save_has_the_snapshot_of_the_state(launch: Launch) -> None:
    # The last writer stages in waves: it may never hold more than a part in memory.
    modes = [(staging, WriteOptions()) for staging in STAGINGS]
    modes.append((STAGINGS[1], WriteOptions(max_host_bytes=65536)))
    for number, (staging, options) in enumerate(modes):
        path = launch.path(str(number))
        state = everything(launch)
        handle = torch_ckpt.async_save(state, path, staging=staging, options=options)
        handle.wait_staged(PATIENCE_SECONDS)
        overwrite(state)
        metadata = handle.result(PATIENCE_SECONDS).metadata()
        assert handle.done()
        assert set(metadata.state_dict_metadata) >= {"note", "old", "plain.0", "sharded.vector"}
        assert_saved(launch, path)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        model(torch.randn(4, 7)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def case_an_fsdp_model_trains_while_it_is_saved(launch: Launch) -> None:
    for staging in STAGINGS:
        path = launch.path(staging)
        model, optimizer = trained_model(launch, seed=1)
        expected = copy.deepcopy(full_state(model, optimizer))
        parts = get_state_dict(model, optimizer)
        with held("engine begins", path) as may_stage, held("files are written", path) as may_end:
            if staging == "blocking":
                may_stage.open()
            else:
                # Forward and backward run before a tensor is read. This hook runs before the
                # guard's.
                optimizer.register_step_pre_hook(lambda *_, gate=may_stage: gate.open())
            state = {"model": parts[0], "optimizer": parts[1]}
            handle = torch_ckpt.async_save(state, path, staging=staging)
            handle.guard(optimizer)
            train(model, optimizer)
            assert handle.staged.done()
            assert not handle.done()
            may_end.open()
            handle.result(PATIENCE_SECONDS)
        trained = full_state(model, optimizer)
        assert not torch.equal(trained["model"]["0.weight"], expected["model"]["0.weight"])
        for load in LOADS:
            assert_equal(full_state_loaded(launch, path, load), expected)


@on(4)
def case_ranks_of_a_subgroup_save_and_the_others_do_not(launch: Launch) -> None:
    half = launch.size // 2
    groups = [dist.new_group(list(range(half))), dist.new_group(list(range(half, launch.size)))]
    for side, group in enumerate(groups):
        path = launch.path(str(side))
        state = {"plain": tensor_of("plain", 9), f"of rank {launch.rank}": launch.rank}
        if launch.rank // half == side:
            handle = torch_ckpt.async_save(state, path, process_group=group)
            metadata = handle.result(PATIENCE_SECONDS).metadata()
            ranks = range(side * half, (side + 1) * half)
            assert set(metadata.state_dict_metadata) == {"plain", *(f"of rank {r}" for r in ranks)}
            loaded = {"plain": torch.zeros(9), f"of rank {launch.rank}": -1}
            torch_ckpt.load(loaded, path, process_group=group)
            assert_equal(loaded, state)
        else:
            with pytest.raises(ValueError, match="not in the process group"):
                torch_ckpt.async_save(state, path, process_group=group)


def case_a_single_rank_saves_while_the_others_do_not(launch: Launch) -> None:
    path = launch.path()
    if launch.rank == 1:
        torch_ckpt.async_save({"rank": 1}, path, no_dist=True).result(PATIENCE_SECONDS)
        loaded = {"rank": -1}
        torch_ckpt.load(loaded, path, no_dist=True)
        assert loaded == {"rank": 1}


# --- background saves -----------------------------------------------------------------------------


def case_a_save_uses_no_process_group_in_the_background(launch: Launch) -> None:
    for staging in STAGINGS:
        state, path = everything(launch), launch.path(staging)
        with threads_in_collectives() as users, held("files are written", path) as may_end:
            handle = torch_ckpt.async_save(state, path, staging=staging)
            for number in range(50):
                reduced = torch.tensor([float(number), 1.0])
                dist.all_reduce(reduced)
                assert reduced.tolist() == [float(number * launch.size), float(launch.size)]
            assert not handle.done()
            may_end.open()
            handle.result(PATIENCE_SECONDS)
        assert users == {threading.main_thread().name}
        assert_saved(launch, launch.path(staging))


# --- saves of one structure -----------------------------------------------------------------------


def case_a_structure_is_planned_once_until_it_changes_on_a_rank(launch: Launch) -> None:
    planned = []

    def note(operation: str, _path: str) -> None:
        if operation == "plan of all ranks":
            planned.append(operation)

    mesh, full = cases.mesh_1d(launch), torch.arange(35.0).reshape(7, 5)

    def sharded(step: int, by: Placement) -> StateDict:
        return {"t": distribute_tensor(full + step, mesh, [by]), "plain": full - step, "step": step}

    own = {"own": full} if launch.rank == 1 else {}
    states = [sharded(step, Shard(0)) for step in range(3)]
    states += [sharded(3, Shard(1)), sharded(4, Replicate()), {"t": full}, {"t": full, **own}]
    plans = [1, 1, 1, 2, 3, 4, 5]
    with at_fault_points(note):
        for number, state in enumerate(states):
            path = launch.path(str(number))
            if number == 2:
                saved = torch_ckpt.save(state, path)
            else:
                saved = torch_ckpt.async_save(state, path).result(PATIENCE_SECONDS)
            assert len(planned) == (plans[number] if launch.rank == 0 else 0)
            assert ("own" in saved.metadata().state_dict_metadata) is (number == 6)
            for load in LOADS:
                loaded = emptied(state)
                load(loaded, path)
                assert_equal(loaded, {**state, "t": full + state.get("step", 0)})


# --- callbacks ------------------------------------------------------------------------------------


def case_files_are_reported_on_all_ranks_which_then_wait_for_the_end_of_on_commit(
    launch: Launch,
) -> None:
    path, ended = launch.path("ckpt"), launch.path("ended")
    store = dist.PrefixStore("on_commit", dist.distributed_c10d._get_default_store())
    calls: list[Any] = []

    def written() -> None:
        calls.append(("written", (path / ".metadata").exists()))
        store.set(f"written {launch.rank}", "")

    def on_commit(checkpoint: torch_ckpt.Checkpoint) -> None:
        calls.append((f"on_commit of {checkpoint.path}", (path / ".metadata").exists()))
        # The other ranks have finished their part: their files are durable.
        store.wait([f"written {rank}" for rank in range(launch.size)])
        # Longer than the timeout of ranks, as an upload would: no other thread sets the event.
        threading.Event().wait(2.0)
        ended.write_text("ended")

    with calling({"files are written": written}):
        handle = torch_ckpt.async_save(everything(launch), path, on_commit=on_commit, timeout=1.0)
        handle.result(PATIENCE_SECONDS)
    assert ended.exists()
    expected: list[Any] = [("written", False)]
    if launch.rank == 0:
        expected.append((f"on_commit of {path}", True))
    assert calls == expected


def case_a_failing_on_commit_fails_the_save_on_all_ranks(launch: Launch) -> None:
    path = launch.path()

    def on_commit(_checkpoint: Any) -> None:
        raise OSError(errno.EIO, "on purpose")

    handle = torch_ckpt.async_save(everything(launch), path, on_commit=on_commit)
    error = handle.committed.exception(PATIENCE_SECONDS)
    assert isinstance(error, OnCommitFailed)
    assert "on purpose" in str(error)
    assert_saved(launch, path)


def case_each_rank_has_metrics(launch: Launch) -> None:
    handle = torch_ckpt.async_save(everything(launch), launch.path("saved"))
    handle.result(PATIENCE_SECONDS)
    metrics = handle.metrics()
    assert metrics.rank == launch.rank
    assert metrics.bytes > 0
    assert 0 < metrics.blocked_s <= metrics.written_s <= metrics.total_s


# --- failures -------------------------------------------------------------------------------------


def case_an_error_unseen_on_one_rank_fails_the_next_save_on_all(launch: Launch) -> None:
    path = launch.path("1")
    with full_disk_on(1):
        handle = torch_ckpt.async_save(everything(launch), path)
        wait_for_futures([handle.committed], PATIENCE_SECONDS)
    if launch.rank != 1:
        assert handle.committed.exception() is not None

    def save() -> None:
        state, path = everything(launch), launch.path("2")
        torch_ckpt.async_save(state, path, timeout=1e6).result(PATIENCE_SECONDS)

    with pytest.raises(dcp.CheckpointException) as caught:
        save()
    assert list(caught.value.failures) == [1]
    assert not (launch.path("2") / ".metadata").exists()
    save()
    assert_saved(launch, launch.path("2"))


def case_a_source_changed_too_early_on_one_rank_fails_the_save_on_all(launch: Launch) -> None:
    for number, name in enumerate(("plain.3", "sharded.even rows", "old")):
        path = launch.path(str(number))
        state = everything(launch)
        with held("engine begins", path) as may_stage:
            handle = torch_ckpt.async_save(state, path, staging="overlapped")
            if launch.rank == 1:
                value = state
                for key in name.split("."):
                    value = value[int(key) if isinstance(value, list) else key]
                overwrite(value)
            may_stage.open()
            causes = failure_of(launch, lambda: handle.result(PATIENCE_SECONDS))  # noqa: B023
        assert set(causes) == {1}
        assert isinstance(causes[1], SourceChanged)
        assert str(causes[1]).startswith(f"{name}: changed before"), causes[1]
        assert list(path.iterdir()) == []


def case_a_full_disk_on_one_rank_fails_the_save_on_all(launch: Launch) -> None:
    for staging in STAGINGS:
        path = launch.path(staging)
        with full_disk_on(1):
            handle = torch_ckpt.async_save(everything(launch), path, staging=staging)
            causes = failure_of(launch, lambda: handle.result(PATIENCE_SECONDS))  # noqa: B023
        assert_is_full_disk(causes, 1, path)
        assert list(path.iterdir()) == []
        torch_ckpt.async_save(everything(launch), path, staging=staging).result(PATIENCE_SECONDS)
        assert_saved(launch, path)


def case_a_failure_after_the_write_on_one_rank_publishes_nothing(launch: Launch) -> None:
    path = launch.path()
    with failing("files are written", errno.EIO, path) if launch.rank == 1 else nullcontext():
        handle = torch_ckpt.async_save(everything(launch), path)
        causes = failure_of(launch, lambda: handle.result(PATIENCE_SECONDS))
    assert {rank: type(cause) for rank, cause in causes.items()} == {1: OSError}
    assert list(path.iterdir()) == []


class FailsOnRank1:
    """Stateful whose state rank 1 cannot read."""

    def state_dict(self) -> StateDict:
        if dist.get_rank() == 1:
            raise KeyError("on purpose")
        return {"value": 1}

    def load_state_dict(self, state: StateDict) -> None:
        raise AssertionError("never")


@on(2, 4)
def case_a_failing_state_dict_on_one_rank_fails_the_save_on_all(launch: Launch) -> None:
    for staging in STAGINGS:
        path = launch.path(staging)
        state = {"failing": FailsOnRank1(), "t": tensor_of("t", 5)}

        def save(path: Path = path, state: StateDict = state, staging: str = staging) -> None:
            # The other ranks do not wait for the timeout.
            handle = torch_ckpt.async_save(state, path, staging=staging, timeout=1e6)
            handle.result(PATIENCE_SECONDS)

        with pytest.raises(CheckpointError, match=r"failing: its state.*on purpose") as caught:
            save()
        # Rank 1 raises its own error if that is known before the save starts.
        if launch.rank != 1 or isinstance(caught.value, dcp.CheckpointException):
            assert isinstance(caught.value, dcp.CheckpointException)
            assert list(caught.value.failures) == [1]
        assert not (path / ".metadata").exists()
        torch_ckpt.async_save(everything(launch), path, staging=staging).result(PATIENCE_SECONDS)
        assert_saved(launch, path)


def case_ranks_that_disagree_about_a_tensor_fail_the_save_on_all(launch: Launch) -> None:
    path = launch.path()
    handle = torch_ckpt.async_save({"t": torch.zeros(3 + launch.rank % 2)}, path)
    causes = failure_of(launch, handle.result, PATIENCE_SECONDS)
    assert set(causes) == {0}
    assert "rank 0 has torch.float32 [3], rank 1 has torch.float32 [4]" in str(causes[0])
    assert not (path / ".metadata").exists()


test_on_ranks = on_ranks(globals())
