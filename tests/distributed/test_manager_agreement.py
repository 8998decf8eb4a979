"""CheckpointManager on ranks: they save at the same steps, stop together, and fail together.

tests/python/manager/test_intervals.py tests the agreement on steps in one process.
"""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from errno import EIO
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.background import replaced
from tests.distributed.cases import Launch
from tests.distributed.launcher import on, on_ranks, takes_several
from tests.distributed.managers import (
    PATIENCE,
    NoState,
    failures_of,
    gathered,
    is_last,
    manager_of,
    restored,
    run_of,
    saved,
    state_of,
)
from tests.fault_hooks import failing, held
from tests.support import no_warnings
from torch_ckpt import CheckpointError, CheckpointManager, PerRank
from torch_ckpt.errors import NotCommitted
from torch_ckpt.events import Event
from torch_ckpt.manager import Preemption, SaveOptions, schedule
from torch_ckpt.multihost import RanksDisagree
from torch_ckpt.ranks import step_agreement

# Seconds after which an absent rank is declared dead.
SHORT = 2.0


def store_of(name: str) -> dist.Store:
    return dist.PrefixStore(name, dist.distributed_c10d._get_default_store())


# --- when -----------------------------------------------------------------------------------------


def case_ranks_with_different_clocks_save_at_the_same_steps(launch: Launch) -> None:
    rank = launch.rank
    clock = SimpleNamespace(
        monotonic=lambda: 1e6 * rank + (1 + rank) * time.monotonic(), sleep=time.sleep
    )
    found: list[int] = []
    step = 0
    interval = timedelta(seconds=0.05)
    with (
        replaced(step_agreement, "time", clock),
        replaced(schedule, "time", clock),
        manager_of(launch, interval=interval) as made,
    ):
        # Until rank 0 has saved a few times, which all ranks notice in the same step.
        while len(found) < 3:
            step += 1
            if made.save(step, state_of(launch, step)):
                found.append(step)
            # Ranks are never in step: some are behind in odd steps.
            if (step + rank) % 2:
                made.all_steps()
        assert gathered(launch, found) == [found] * launch.size
    dist.barrier()
    assert made.all_steps() == found


def case_a_busy_save_is_skipped_on_all_ranks(launch: Launch) -> None:
    with manager_of(launch, saves=SaveOptions(if_busy="skip")) as made:
        with held("rename", "*/write_completed") as gate:
            assert saved(launch, made, [1, 2, 3]) == [1]
            gate.open()
            made.wait_until_finished()
        # Decided by rank 0, and not by what this rank knows of its own save.
        dist.barrier()
        assert saved(launch, made, [4]) == [4]
    dist.barrier()
    assert made.all_steps() == [1, 4]


# --- preemption -----------------------------------------------------------------------------------


def steps_until_preempted(
    launch: Launch, made: CheckpointManager, preempt: Callable[[int], None]
) -> int:
    """Returns the step at which this rank must stop. A collective in each step keeps ranks in
    step."""
    for step in range(1, 1_000_000):
        made.save(step, state_of(launch, step))
        if made.should_stop:
            return step
        preempt(step)
        dist.all_reduce(torch.ones(1))
    raise AssertionError("no rank was preempted")


def case_a_signal_to_one_rank_saves_and_stops_all_at_one_step(launch: Launch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    victim = launch.size - 1
    events: list[Event] = []

    def preempt(step: int) -> None:
        if step == 3 and launch.rank == victim:
            os.kill(os.getpid(), signal.SIGTERM)

    notices = Preemption(signals=(signal.SIGTERM,))
    with manager_of(launch, interval=10**6, preemption=notices, on_event=events.append) as made:
        stopped = steps_until_preempted(launch, made, preempt)
        assert gathered(launch, stopped) == [stopped] * launch.size
        assert stopped > 3
        made.wait_until_finished()
        assert restored(launch, made) == stopped
    [event] = [event for event in events if event.kind == "preempted"]
    assert f"SIGTERM on rank {victim}" in event.message
    assert signal.getsignal(signal.SIGTERM) is before


def case_with_a_deadline_the_last_save_is_complete_on_all_ranks(launch: Launch) -> None:
    file = launch.path("stop")

    def preempt(step: int) -> None:
        if step == 2 and launch.rank == 0:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()

    notices = Preemption(file=file, deadline=60.0)
    with manager_of(launch, interval=10**6, preemption=notices) as made:
        stopped = steps_until_preempted(launch, made, preempt)
        assert not made.is_saving
        assert made.all_steps() == [stopped]


# --- failures -------------------------------------------------------------------------------------


def broken_on(launch: Launch, rank: int) -> AbstractContextManager[None]:
    """Makes this rank unable to write data."""
    return failing("engine begins", EIO) if launch.rank == rank else nullcontext()


def case_a_failure_of_one_rank_is_raised_once_on_all_or_only_counted(launch: Launch) -> None:
    last = launch.size - 1
    for on_error in ("raise", "warn_and_continue"):
        options = {"root": launch.path(on_error), "on_save_error": on_error}
        with manager_of(launch, **options) as made:
            with broken_on(launch, last):
                if on_error == "raise":
                    made.save(1, state_of(launch, 1))
                    causes = failures_of(made.wait_until_finished)
                    assert list(causes) == [last]
                    assert "engine begins" in str(causes[last])
                    made.check_for_errors()
                else:
                    saved(launch, made, [1, 2])
                    made.wait_until_finished()
                    assert made.save_errors == 2
            errors = made.save_errors
            dist.barrier()
            assert made.all_steps() == []
            assert saved(launch, made, [3]) == [3]
            made.wait_until_finished()
            assert restored(launch, made) == 3
            assert made.save_errors == errors
            dist.barrier()
            assert [(info.step, info.state) for info in made.steps()] == [(3, "complete")]


@takes_several
def case_a_state_that_one_rank_cannot_read_fails_the_save_at_once_on_all(launch: Launch) -> None:
    for rank, check in ((0, "off"), (launch.size - 1, "off"), (launch.size - 1, "warn")):
        with manager_of(
            launch, saves=SaveOptions(check_replicas=check, check_replicas_every=1)
        ) as made:
            state = state_of(launch, 1)
            if launch.rank == rank:
                state["loader"] = NoState()

            def save_and_wait(made: CheckpointManager = made, state: Any = state) -> None:
                made.save(1, state)
                made.wait_until_finished()

            with pytest.raises(BaseException, match="no state today"):
                save_and_wait()
            dist.barrier()
            # It has no directory.
            assert made.steps() == []
            dist.barrier()
            assert saved(launch, made, [2]) == [2]
            made.wait_until_finished()
            made.delete(2)
            dist.barrier()


def case_a_commit_that_fails_reaches_all_ranks(launch: Launch) -> None:
    with manager_of(launch) as made:
        fails = launch.rank == 0
        with failing("rename", EIO, "*/write_completed") if fails else nullcontext():
            made.save(1, state_of(launch, 1))
            causes = failures_of(made.wait_until_finished)
        assert {rank: type(cause) for rank, cause in causes.items()} == {0: NotCommitted}
        dist.barrier()
        assert made.steps() == []


@takes_several
def case_wrong_metrics_on_one_rank_fail_the_save_at_once_on_all(launch: Launch) -> None:
    metrics: dict[str, Any] = {"loss": "low" if is_last(launch) else 1.0}
    with manager_of(launch) as made:
        if is_last(launch):
            with pytest.raises(ValueError, match="could not convert string to float"):
                made.save(1, state_of(launch, 1), metrics=metrics)
        else:
            made.save(1, state_of(launch, 1), metrics=metrics)
            assert list(failures_of(made.wait_until_finished)) == [launch.size - 1]
        assert saved(launch, made, [2]) == [2]


@takes_several
def case_a_rank_that_does_not_make_a_manager_is_named(launch: Launch) -> None:
    store, absent = store_of("no manager"), launch.size - 1
    if launch.rank == absent:
        store.wait([f"gave up {rank}" for rank in range(absent)])
    with pytest.raises(TimeoutError, match=f"CheckpointManager: rank {absent} did not arrive"):
        CheckpointManager(launch.path("run"), preemption=None, timeout=SHORT)
    store.set(f"gave up {launch.rank}", "")
    run_of(launch, [1])


@takes_several
@on(2, 4)
def case_a_rank_absent_from_a_save_is_named(launch: Launch) -> None:
    store, absent = store_of("no save"), launch.size - 1
    with manager_of(launch, timeout=SHORT) as made:
        made.restore(state_of(launch, 0))
        if launch.rank == absent:
            store.wait([f"gave up {rank}" for rank in range(absent)])
        made.save(1, state_of(launch, 1))
        causes = failures_of(made.wait_until_finished)
        store.set(f"gave up {launch.rank}", "")
        assert list(causes) == [absent]
        assert isinstance(causes[absent], TimeoutError)
        assert f"rank {absent} sent no heartbeat for 2 s" in str(causes[absent])
        dist.barrier()
        saved(launch, made, [2])
        made.wait_until_finished()
        assert made.all_steps() == [2]


@takes_several
def case_a_rank_absent_from_the_first_save_is_named(launch: Launch) -> None:
    store, absent = store_of("no first save"), launch.size - 1
    with manager_of(launch, timeout=SHORT) as made:
        if launch.rank == absent:
            store.wait([f"gave up {rank}" for rank in range(absent)])
        with pytest.raises(TimeoutError, match=rf"save: rank {absent} did not arrive within"):
            made.save(1, state_of(launch, 1))
        store.set(f"gave up {launch.rank}", "")
        dist.barrier()
        saved(launch, made, [2])


@takes_several
@on(4)
def case_different_roots_are_named_with_their_ranks(launch: Launch) -> None:
    root = launch.path("b" if is_last(launch) else "a")
    with pytest.raises(RanksDisagree, match="ranks have different roots:") as caught:
        CheckpointManager(root, preemption=None, timeout=PATIENCE)
    assert f"rank 0: {launch.path('a')}" in str(caught.value)
    assert f"rank {launch.size - 1}: {launch.path('b')}" in str(caught.value)
    run_of(launch, [1])


# --- replicas -------------------------------------------------------------------------------------


def differing(launch: Launch, step: int) -> dict[str, Any]:
    """Makes a state whose tensor has another value on the last rank."""
    state = state_of(launch, step)
    state["model"] = {"w": torch.full((7,), float(is_last(launch))), "b": torch.zeros(3)}
    return state


@takes_several
@on(4)
def case_differing_replicas_are_named_with_their_ranks(launch: Launch) -> None:
    most = "rank 0 has" if launch.size == 2 else f"ranks 0-{launch.size - 2} have"
    text = f"model.w: {most} one value, rank {launch.size - 1} another"
    with manager_of(launch, saves=SaveOptions(check_replicas="error")) as made:
        with pytest.raises(CheckpointError, match="1 value differs between ranks") as caught:
            made.save(1, differing(launch, 1))
        assert text in str(caught.value)
        assert gathered(launch, str(caught.value)) == [str(caught.value)] * launch.size
        assert saved(launch, made, [2]) == [2]


@takes_several
def case_differing_objects_are_refused_on_request(launch: Launch) -> None:
    with manager_of(launch, saves=SaveOptions(check_replicas="error")) as made:
        state = state_of(launch, 1) | {"elapsed": launch.rank}
        with pytest.raises(CheckpointError, match="elapsed: rank 0 has one value"):
            made.save(1, state)
        dist.barrier()
        assert made.steps() == []
        dist.barrier()


@takes_several
def case_differing_replicas_are_saved_with_a_warning_on_rank_0(launch: Launch) -> None:
    events: list[Event] = []
    saves = SaveOptions(check_replicas="warn", check_replicas_every=2)
    with (
        manager_of(launch, saves=saves, on_event=events.append) as made,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for step in (1, 2, 3):
            assert made.save(step, differing(launch, step))
    named = [w for w in caught if "model.w: rank" in str(w.message)]
    assert len(named) == (2 if launch.rank == 0 else 0)
    # Every second save is checked.
    assert [event.step for event in events if event.kind == "differing_replicas"] == [1, 3]
    dist.barrier()
    assert made.all_steps() == [1, 2, 3]


class Loader:
    """Data loader that ignores ranks."""

    def __init__(self, rank: int) -> None:
        self.state: dict[str, Any] = {"samples": 10 + rank, "order": torch.arange(4) * (rank + 1)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@takes_several
def case_per_rank_values_are_named_by_default_and_not_with_per_rank(launch: Launch) -> None:
    state = state_of(launch, 1) | {
        "loader": Loader(launch.rank),
        "elapsed": 0.5 * launch.rank,
        "seen": {"files": {f"file {n}" for n in range(9)}},
    }
    events: list[Event] = []
    with manager_of(launch, on_event=events.append) as made, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.save(1, state)
    [message] = [event.message for event in events if event.kind == "differing_replicas"]
    for name in ("loader", "loader.order", "elapsed"):
        assert f"{name}: rank 0 has one value, rank" in message
    assert "3 values differ between ranks" in message
    assert "torch_ckpt.PerRank" in message
    state["loader"] = PerRank(state["loader"])
    state["elapsed"] = PerRank(state["elapsed"])
    with no_warnings(), manager_of(launch, root=launch.path("per rank")) as made:
        assert made.save(1, state)


test_on_ranks = on_ranks(globals(), (1, 2, 4))
