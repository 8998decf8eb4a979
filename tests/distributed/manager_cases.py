"""What ranks do with a CheckpointManager; run under torchrun by test_manager_ranks.py.

Cases are run, and write their outcomes, as those of cases.py.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from errno import EIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.async_saves import LIMIT, Gate
from tests.distributed import cases
from tests.distributed.cases import Launch, mesh_1d, tensor_of
from tests.support import assert_equal, data_files, flip_bit
from torch_ckpt import CheckpointManager, intervals, restoring, steps
from torch_ckpt.app_state import PerRank
from torch_ckpt.errors import CheckpointError, LoadMismatch, NotCommitted
from torch_ckpt.events import Event
from torch_ckpt.multihost import RanksDisagree
from torch_ckpt.steps import MARKER_NAME

# For what nothing should be waiting, in seconds.
PATIENCE = 60.0

# After which a rank that does not come is given up.
SHORT = 2.0

#: Cases in which ranks do not do the same.
SEVERAL: list[str] = []


def takes_several(case: Callable[[Launch], None]) -> Callable[[Launch], None]:
    SEVERAL.append(case.__name__.removeprefix("case_"))
    return case


@contextmanager
def manager_of(launch: Launch, **options: Any) -> Iterator[CheckpointManager]:
    """Beneath the case's directory; it does not watch for signals by default."""
    root = options.pop("root", launch.path("run"))
    options = {"preemption_signals": (), "timeout": PATIENCE, **options}
    with CheckpointManager(root, **options) as made:
        yield made


def state_of(launch: Launch, step: int) -> dict[str, Any]:
    """A sharded tensor, a common one, one value of each rank, and a number."""
    whole = tensor_of("sharded", 4 * launch.size + 1, 3).nan_to_num() + step
    return {
        "sharded": {"w": distribute_tensor(whole, mesh_1d(launch), [Shard(0)], src_data_rank=None)},
        "common": torch.full((5,), float(step)),
        "own": PerRank(100 * launch.rank + step),
        "step": step,
    }


def assert_state(launch: Launch, state: dict[str, Any], step: int) -> None:
    """Fails unless the state is that of a step."""
    expected = state_of(launch, step)
    sharded = state["sharded"]["w"]
    assert isinstance(sharded, DTensor)
    assert_equal(sharded.to_local(), expected["sharded"]["w"].to_local())
    assert_equal(state["common"], expected["common"])
    assert state["own"].value == expected["own"].value
    assert state["step"] == step


def restored(launch: Launch, made: CheckpointManager, step: int | None = None) -> int:
    """The step that is restored, the same on all ranks, and its state is right."""
    state = state_of(launch, 0)
    found = made.restore(state, step)
    assert_state(launch, state, found)
    assert gathered(launch, found) == [found] * launch.size
    return found


def gathered(launch: Launch, value: Any) -> list[Any]:
    """By rank."""
    values: list[Any] = [None] * launch.size
    dist.all_gather_object(values, value)
    return values


def saved(launch: Launch, made: CheckpointManager, numbers: Any, **options: Any) -> list[int]:
    """The steps, of these, at which all ranks have begun a save."""
    found = [n for n in numbers if made.save(n, state_of(launch, n), **options)]
    assert gathered(launch, found) == [found] * launch.size
    return found


def run_of(launch: Launch, numbers: Any) -> None:
    """A run that has ended."""
    with manager_of(launch) as made:
        saved(launch, made, numbers)
    dist.barrier()


def step_path(launch: Launch, step: int) -> Path:
    return launch.path("run", f"{step:010d}")


def is_last(launch: Launch) -> bool:
    return launch.rank == launch.size - 1


def failures_of(work: Callable[[], Any]) -> dict[int, BaseException]:
    """By rank, of the CheckpointException that ``work`` must raise."""
    with pytest.raises(CheckpointException) as caught:
        work()
    return {rank: cause for rank, (cause, _stack) in caught.value.failures.items()}


def store_of(name: str) -> dist.Store:
    return dist.PrefixStore(name, dist.distributed_c10d._get_default_store())


# --- saving and restoring ------------------------------------------------------------------------


def case_all_ranks_go_on_where_they_have_stopped(launch: Launch) -> None:
    for begin, until in ((0, 4), (3, 7)):
        with manager_of(launch, interval=3) as made:
            assert restored(launch, made) == begin
            saved(launch, made, range(begin + 1, until + 1))
        dist.barrier()
    with manager_of(launch) as made:
        assert made.all_steps() == [3, 6]
        assert restored(launch, made, 6) == 6


def case_the_marker_has_rank_0s_metrics_and_the_number_of_ranks(launch: Launch) -> None:
    with manager_of(launch) as made:
        rank = float(launch.rank)
        made.save(1, state_of(launch, 1), metrics={"rank": rank}, notes={"rank": launch.rank})
        made.wait_until_finished()
        [info] = made.steps()
    assert (info.metrics, info.notes) == ({"rank": 0.0}, {"rank": 0})
    marker = steps.read_marker(info.path)
    assert marker is not None
    assert marker["ranks"] == launch.size


def case_what_the_first_saves_may_not_do_is_refused_on_all_ranks(launch: Launch) -> None:
    run_of(launch, [1, 2, 3])
    best = {"keep_best": 1, "best_metric": "los"}
    with manager_of(launch, **best) as made:
        with pytest.raises(FileExistsError, match="has steps up to 3"):
            made.save(3, state_of(launch, 3))
        assert restored(launch, made) == 3
        # Only rank 0's metrics count.
        metrics = {"loss": 1.0} if launch.rank == 0 else {"los": 1.0}
        with pytest.raises(ValueError, match="did you mean 'loss'"):
            made.save(4, state_of(launch, 4), metrics=metrics)
        with pytest.raises(ValueError, match="steps must not decrease"):
            made.save(2, state_of(launch, 2))
        saved(launch, made, [5], metrics={"los": 1.0})
    with manager_of(launch) as made, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved(launch, made, [4], overwrite=True)
        saved(launch, made, [5])


def case_rank_0_deletes_for_all(launch: Launch) -> None:
    events: list[Event] = []
    with manager_of(launch, keep_last=2, on_event=events.append) as made:
        saved(launch, made, range(1, 6))
    dist.barrier()
    assert made.all_steps() == [4, 5]
    deleted = [event.step for event in events if event.kind == "deleted"]
    assert deleted == ([1, 2, 3] if launch.rank == 0 else [])


@takes_several
def case_ranks_restore_the_step_that_rank_0_sees(launch: Launch) -> None:
    run_of(launch, [1, 2, 3])
    with manager_of(launch) as made:
        found = made.steps()
        # As on file systems where what others have made comes late.
        seen = found[:2] if launch.rank == 0 else found[launch.rank % 3 :]
        made._store.entries = lambda **_: seen  # type: ignore[method-assign]
        assert restored(launch, made) == 2


def case_a_shard_that_is_damaged_has_all_ranks_pass_over_its_step(launch: Launch) -> None:
    run_of(launch, [1, 2, 3])
    if launch.rank == 0:
        file = sorted(data_files(step_path(launch, 3)))[-1]
        flip_bit(file, file.stat().st_size // 2, 5)
    dist.barrier()
    events: list[Event] = []
    with manager_of(launch, on_event=events.append) as made:
        assert restored(launch, made) == 2
    assert [(event.kind, event.step) for event in events] == [("damaged", 3), ("restored", 2)]


@takes_several
@contextmanager
def not_found(launch: Launch, made: CheckpointManager, times: int) -> Iterator[None]:
    """Step 2 is not found on the last rank, so many times."""
    path_of, patience = made._store.path_of, restoring._PATIENCE_SECONDS  # type: ignore[attr-defined]
    left = [times if is_last(launch) else 0]

    def path_once(step: int) -> str:
        if step == 2 and left[0] > 0:
            left[0] -= 1
            return f"{path_of(step)}-away"
        return str(path_of(step))

    made._store.path_of = path_once  # type: ignore[attr-defined]
    restoring._PATIENCE_SECONDS = (0.01,) * 3
    try:
        yield
    finally:
        made._store.path_of, restoring._PATIENCE_SECONDS = path_of, patience  # type: ignore[attr-defined]


@takes_several
def case_a_step_that_is_late_on_one_rank_is_waited_for(launch: Launch) -> None:
    run_of(launch, [1, 2])
    with manager_of(launch) as made, not_found(launch, made, 2):
        assert restored(launch, made) == 2


@takes_several
def case_a_step_that_one_rank_does_not_find_is_not_passed_over(launch: Launch) -> None:
    run_of(launch, [1, 2])
    with manager_of(launch) as made, not_found(launch, made, 100):
        failures = failures_of(lambda: made.restore(state_of(launch, 0)))
    assert list(failures) == [launch.size - 1]
    assert isinstance(failures[launch.size - 1], FileNotFoundError)


@takes_several
def case_ranks_that_save_different_steps_are_told(launch: Launch) -> None:
    with manager_of(launch, on_save_error="warn_and_continue") as made:
        made.save(10 + is_last(launch), state_of(launch, 1))
        made.wait_until_finished()
        assert made.save_errors == 1
        assert made.all_steps() == []
        dist.barrier()
        assert saved(launch, made, [20]) == [20]
    assert manager_sees(launch) == [20]


@takes_several
def case_a_root_that_is_another_one_on_a_rank_is_no_step(launch: Launch) -> None:
    with manager_of(launch) as made:
        patience, steps._PATIENCE_SECONDS = steps._PATIENCE_SECONDS, 0.1
        made_writer = made._store.writer

        def elsewhere(*args: Any, **options: Any) -> Any:
            writer = made_writer(*args, **options)
            # The same path, but on this rank it is on a disk of its own.
            write_values = writer.write_values

            def write(*args: Any) -> Any:
                written = write_values(*args)
                for place in written.places:
                    file = writer.path / place[0]
                    if file.exists():
                        file.rename(launch.path(f"elsewhere-{launch.rank}-{place[0]}"))
                return written

            writer.write_values = write
            return writer

        if is_last(launch):
            made._store.writer = elsewhere  # type: ignore[method-assign]
        made.save(1, state_of(launch, 1))
        failures = failures_of(made.wait_until_finished)
        steps._PATIENCE_SECONDS = patience
        assert isinstance(failures[0], NotCommitted)
        assert "all ranks must see the same directory" in str(failures[0])
    assert manager_sees(launch) == []


def manager_sees(launch: Launch) -> list[int]:
    """The complete steps, when all ranks have come here."""
    dist.barrier()
    return CheckpointManager(launch.path("run"), read_only=True).all_steps()


@takes_several
def case_whatever_one_rank_raises_before_a_save_begins_the_next_one_succeeds(
    launch: Launch,
) -> None:
    with manager_of(launch, on_save_error="warn_and_continue") as made:
        for step, error in enumerate(
            (CheckpointException("test", {}), RuntimeError("test"), ValueError("test")), 1
        ):

            def fail(error: BaseException = error) -> None:
                raise error

            handle = made.before_save(fail) if is_last(launch) else None
            with suppress(ValueError):
                made.save(step, state_of(launch, step))
            made.wait_until_finished()
            if handle is not None:
                handle.remove()
            dist.barrier()
        assert saved(launch, made, [9]) == [9]
    assert manager_sees(launch) == [9]


@takes_several
def case_warnings_that_are_errors_do_not_part_the_ranks(launch: Launch) -> None:
    with manager_of(launch, check_replicas="warn", check_replicas_every=1) as made:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in (1, 2):
                state = state_of(launch, step)
                state["common"] += launch.rank
                assert made.save(step, state)
        made.wait_until_finished()
    with manager_of(launch) as made, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert made.restore(state_of(launch, 0), 1) == 1


@takes_several
def case_what_only_lacks_its_marker_is_named_by_rank_0(launch: Launch) -> None:
    run_of(launch, [1, 2])
    if launch.rank == 0:
        os.unlink(Path(launch.path("run"), "0000000002", MARKER_NAME))
    dist.barrier()
    with manager_of(launch) as made, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert restored(launch, made) == 1
    named = [warning for warning in caught if "0000000002" in str(warning.message)]
    assert len(named) == (1 if launch.rank == 0 else 0)


@takes_several
def case_what_rank_0_cannot_make_is_told_to_the_others(launch: Launch) -> None:
    file = launch.path("file")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    with pytest.raises((OSError, RuntimeError)), manager_of(launch, tensorboard=file / "runs"):
        pass


def case_where_all_steps_are_damaged_all_ranks_raise(launch: Launch) -> None:
    run_of(launch, [1, 2])
    if launch.rank == 0:
        for step in (1, 2):
            (step_path(launch, step) / ".metadata").write_bytes(b"nothing")
    dist.barrier()
    with manager_of(launch) as made, pytest.raises(CheckpointError, match="none of the steps in"):
        made.restore(state_of(launch, 0))


def case_a_step_that_is_not_there_is_refused_on_all_ranks(launch: Launch) -> None:
    run_of(launch, [1, 2])
    with manager_of(launch) as made:
        with pytest.raises(FileNotFoundError, match=r"step 7 is not there; complete are \[1, 2\]"):
            made.restore(state_of(launch, 0), 7)
        assert restored(launch, made, 1) == 1


@takes_several
def case_ranks_that_ask_for_different_steps_are_told(launch: Launch) -> None:
    run_of(launch, [1, 2])
    with manager_of(launch) as made:
        with pytest.raises(RanksDisagree, match="ranks ask for different steps:") as caught:
            made.restore(state_of(launch, 0), 1 if is_last(launch) else 2)
        assert f"rank {launch.size - 1}: 1" in str(caught.value)


@takes_several
def case_a_state_that_does_not_fit_on_one_rank_is_an_error_on_all(launch: Launch) -> None:
    run_of(launch, [1])
    with manager_of(launch) as made:
        state = state_of(launch, 0)
        if is_last(launch):
            state["more"] = torch.zeros(3)
        causes = failures_of(lambda: made.restore(state))
        assert [type(cause) for cause in causes.values()] == [LoadMismatch]
        assert list(causes) == [launch.size - 1]


class NoState:
    """Stateful, and fails."""

    def state_dict(self) -> Any:
        raise RuntimeError("no state today")

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError("never")


@takes_several
def case_a_state_that_one_rank_cannot_read_ends_the_restore_of_all(launch: Launch) -> None:
    run_of(launch, [1])
    with manager_of(launch) as made:
        state = state_of(launch, 0)
        if is_last(launch):
            state["loader"] = NoState()
        error = CheckpointError if is_last(launch) else RuntimeError
        with pytest.raises(error, match="no state today"):
            made.restore(state)
        assert restored(launch, made) == 1


def case_two_managers_take_turns(launch: Launch) -> None:
    with (
        manager_of(launch, root=launch.path("one")) as one,
        manager_of(launch, root=launch.path("other"), interval=2) as other,
    ):
        for step in range(1, 5):
            saved(launch, one, [step])
            saved(launch, other, [step])
    dist.barrier()
    assert (one.all_steps(), other.all_steps()) == ([1, 2, 3, 4], [2, 4])


@takes_several
def case_a_group_saves_without_the_other_ranks(launch: Launch) -> None:
    half = launch.size // 2
    groups = [dist.new_group([*range(n * half, n * half + half)]) for n in range(2)]
    number = launch.rank // half
    root = launch.path(f"half {number}")
    options = {"if_busy": "skip", "async_saves": False, "root": root}
    with manager_of(launch, process_group=groups[number], **options) as made:
        for step in range(1, 3 + number):
            assert made.save(step, {"w": torch.full((3,), float(step)), "own": PerRank(step)})
        state = {"w": torch.zeros(3), "own": PerRank(0)}
        assert made.restore(state) == 2 + number
        assert state["w"].tolist() == [2.0 + number] * 3
    dist.barrier()
    marker = steps.read_marker(str(root / "0000000001"))
    assert marker is not None
    assert marker["ranks"] == half


# --- when ----------------------------------------------------------------------------------------


class SkewedTime:
    """The module of the time on a rank whose clock is another one's, and goes at another speed."""

    def __init__(self, rank: int) -> None:
        import time

        self._time = time
        self._rank = rank
        self.sleep = time.sleep

    def monotonic(self) -> float:
        return 1e6 * self._rank + (1 + self._rank) * self._time.monotonic()


def case_ranks_with_other_clocks_save_at_the_same_steps(launch: Launch) -> None:
    before = intervals.time
    intervals.time = SkewedTime(launch.rank)  # type: ignore[assignment]
    try:
        with manager_of(launch, interval=timedelta(seconds=0.05)) as made:
            found: list[int] = []
            step = 0
            # Until rank 0 has saved a few times, as all ranks hear in the same step.
            while len(found) < 3:
                step += 1
                if made.save(step, state_of(launch, step)):
                    found.append(step)
                # Ranks are never in step: some are behind in odd steps.
                if (step + launch.rank) % 2:
                    made.all_steps()
            assert gathered(launch, found) == [found] * launch.size
    finally:
        intervals.time = before
    dist.barrier()
    assert made.all_steps() == found


def case_decisions_leave_nothing_in_the_store(launch: Launch) -> None:
    with manager_of(launch, if_busy="skip", async_saves=False) as made:
        for step in range(1, 6):
            assert made.save(step, state_of(launch, step))
            # Rank 0 must find itself done at the next step.
            dist.barrier()
        made._deletions.settle()
        dist.barrier()
        decisions = made._schedule._decisions
        assert decisions.number == 5
        if launch.size > 1 and launch.rank == 0:
            keys = decisions._meeting.keys("")
            assert not any(keys.check([str(number)]) for number in range(decisions.number))


@takes_several
def case_a_rank_at_another_step_is_told(launch: Launch) -> None:
    with manager_of(launch, interval=timedelta(hours=1)) as made:
        if launch.rank == 0:
            assert not made.save(5, state_of(launch, 5))
        else:
            with pytest.raises(
                CheckpointError, match=f"rank {launch.rank} came to step 6 where rank 0 came to 5"
            ):
                made.save(6, state_of(launch, 6))


def case_a_busy_save_is_skipped_on_all_ranks(launch: Launch) -> None:
    gate = Gate()
    commit = steps._StepWriter.commit

    def commit_later(self: Any, data: bytes, files: set[str]) -> None:
        gate()
        commit(self, data, files)

    steps._StepWriter.commit = commit_later  # type: ignore[method-assign]
    try:
        with manager_of(launch, if_busy="skip") as made:
            assert saved(launch, made, [1, 2, 3]) == [1]
            gate.open()
            made.wait_until_finished()
            # Not by what this rank knows of its own save, but by what rank 0 does.
            dist.barrier()
            assert saved(launch, made, [4]) == [4]
    finally:
        gate.open()
        steps._StepWriter.commit = commit  # type: ignore[method-assign]
    dist.barrier()
    assert made.all_steps() == [1, 4]


# --- preemption ----------------------------------------------------------------------------------


def until_told(launch: Launch, made: CheckpointManager, told: Callable[[int], None]) -> int:
    """The step at which this rank is to stop; ranks are in lockstep by a collective in each."""
    for step in range(1, 1_000_000):
        made.save(step, state_of(launch, step))
        if made.should_stop:
            return step
        told(step)
        dist.all_reduce(torch.ones(1))
    raise AssertionError("no rank was told")


def case_a_signal_to_one_rank_saves_and_stops_all_at_one_step(launch: Launch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    victim = launch.size - 1
    events: list[Event] = []

    def told(step: int) -> None:
        if step == 3 and launch.rank == victim:
            os.kill(os.getpid(), signal.SIGTERM)

    options = {"preemption_signals": (signal.SIGTERM,), "on_event": events.append}
    with manager_of(launch, interval=10**6, **options) as made:
        stopped = until_told(launch, made, told)
        assert gathered(launch, stopped) == [stopped] * launch.size
        assert stopped > 3
        made.wait_until_finished()
        assert restored(launch, made) == stopped
    [event] = [event for event in events if event.kind == "preempted"]
    assert f"SIGTERM on rank {victim}" in event.message
    assert signal.getsignal(signal.SIGTERM) is before


def case_with_a_deadline_the_last_save_is_complete_on_all_ranks(launch: Launch) -> None:
    file = launch.path("stop")

    def told(step: int) -> None:
        if step == 2 and launch.rank == 0:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()

    options = {"preemption_file": file, "preemption_deadline": 60.0}
    with manager_of(launch, interval=10**6, **options) as made:
        stopped = until_told(launch, made, told)
        assert not made.is_saving
        assert made.all_steps() == [stopped]


# --- failures ------------------------------------------------------------------------------------


@contextmanager
def broken_on(launch: Launch, ranks: set[int]) -> Iterator[None]:
    """These ranks cannot write data."""
    write_values = steps._StepWriter.write_values

    def fail(self: Any, *_: object, **__: object) -> Any:
        raise OSError(EIO, "the disk is broken", str(self.path))

    if launch.rank in ranks:
        steps._StepWriter.write_values = fail  # type: ignore[method-assign]
    try:
        yield
    finally:
        steps._StepWriter.write_values = write_values  # type: ignore[method-assign]


def case_one_ranks_failure_reaches_all_and_is_raised_once(launch: Launch) -> None:
    last = launch.size - 1
    with manager_of(launch) as made:
        with broken_on(launch, {last}):
            made.save(1, state_of(launch, 1))
            causes = failures_of(made.wait_until_finished)
        assert list(causes) == [last]
        assert "the disk is broken" in str(causes[last])
        made.check_for_errors()
        dist.barrier()
        assert made.all_steps() == []
        assert saved(launch, made, [2]) == [2]
        made.wait_until_finished()
        assert restored(launch, made) == 2


def case_training_goes_on_without_a_save_that_one_rank_failed(launch: Launch) -> None:
    with manager_of(launch, on_save_error="warn_and_continue") as made:
        with broken_on(launch, {launch.size - 1}):
            saved(launch, made, [1, 2])
            made.wait_until_finished()
        assert made.save_errors == 2
        dist.barrier()
        saved(launch, made, [3])
        made.wait_until_finished()
        assert made.save_errors == 2
        dist.barrier()
        assert [(info.step, info.state) for info in made.steps()] == [(3, "complete")]


def case_a_commit_that_fails_reaches_all_ranks(launch: Launch) -> None:
    write_marker = steps.write_marker

    def fail(directory: str, *_: object) -> None:
        raise OSError(EIO, "no marker today", directory)

    with manager_of(launch) as made:
        steps.write_marker = fail
        try:
            made.save(1, state_of(launch, 1))
            causes = failures_of(made.wait_until_finished)
        finally:
            steps.write_marker = write_marker
        assert [type(cause) for cause in causes.values()] == [NotCommitted]
        assert list(causes) == [0]
        dist.barrier()
        assert made.steps() == []


@takes_several
def case_a_state_that_one_rank_cannot_read_fails_the_save_of_all_at_once(launch: Launch) -> None:
    for check in ("off", "warn"):
        with manager_of(launch, check_replicas=check, check_replicas_every=1) as made:
            state = state_of(launch, 1)
            if is_last(launch):
                state["loader"] = NoState()

            def save_and_wait(made: CheckpointManager = made, state: Any = state) -> None:
                made.save(1, state)
                made.wait_until_finished()

            with pytest.raises(BaseException) as caught:  # noqa: PT011
                save_and_wait()
            assert "no state today" in str(caught.value)
            dist.barrier()
            assert made.all_steps() == []
            assert saved(launch, made, [2]) == [2]
            made.wait_until_finished()
            made.delete(2)
            dist.barrier()


@takes_several
def case_training_goes_on_without_a_state_that_one_rank_could_not_read(launch: Launch) -> None:
    with manager_of(launch, on_save_error="warn_and_continue") as made:
        state = state_of(launch, 1)
        if is_last(launch):
            state["loader"] = NoState()
        assert made.save(1, state) == (not is_last(launch))
        made.wait_until_finished()
        assert made.save_errors == 1
        assert made.last_step is None
        assert saved(launch, made, [2]) == [2]
        made.wait_until_finished()
        assert restored(launch, made) == 2


@takes_several
def case_wrong_metrics_on_one_rank_fail_the_save_of_all_at_once(launch: Launch) -> None:
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
    with pytest.raises(TimeoutError, match=f"CheckpointManager: rank {absent} did not come within"):
        CheckpointManager(launch.path("run"), preemption_signals=(), timeout=SHORT)
    store.set(f"gave up {launch.rank}", "")
    run_of(launch, [1])


@takes_several
def case_a_rank_that_does_not_come_to_a_save_is_named(launch: Launch) -> None:
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
        assert f"rank {absent} gave no sign of life for 2 s" in str(causes[absent])
        dist.barrier()
        saved(launch, made, [2])
        made.wait_until_finished()
        assert made.all_steps() == [2]


@takes_several
def case_a_rank_that_does_not_come_to_the_first_save_is_named(launch: Launch) -> None:
    store, absent = store_of("no first save"), launch.size - 1
    with manager_of(launch, timeout=SHORT) as made:
        if launch.rank == absent:
            store.wait([f"gave up {rank}" for rank in range(absent)])
        with pytest.raises(TimeoutError, match=rf"save: rank {absent} did not come within"):
            made.save(1, state_of(launch, 1))
        store.set(f"gave up {launch.rank}", "")
        dist.barrier()
        saved(launch, made, [2])


@takes_several
def case_different_roots_are_named_with_their_ranks(launch: Launch) -> None:
    root = launch.path("b" if is_last(launch) else "a")
    with pytest.raises(RanksDisagree, match="ranks have different roots:") as caught:
        CheckpointManager(root, preemption_signals=(), timeout=PATIENCE)
    assert f"rank 0: {launch.path('a')}" in str(caught.value)
    assert f"rank {launch.size - 1}: {launch.path('b')}" in str(caught.value)
    run_of(launch, [1])


# --- replicas ------------------------------------------------------------------------------------


def differing(launch: Launch, step: int) -> dict[str, Any]:
    """Has a tensor of another value on the last rank."""
    state = state_of(launch, step)
    state["model"] = {"w": torch.full((7,), float(is_last(launch))), "b": torch.zeros(3)}
    return state


@takes_several
def case_replicas_that_differ_are_named_with_their_ranks(launch: Launch) -> None:
    most = "rank 0" if launch.size == 2 else f"ranks 0-{launch.size - 2}"
    text = f"model.w has one value on {most}; another on rank {launch.size - 1}"
    with manager_of(launch, check_replicas="error") as made:
        with pytest.raises(CheckpointError, match="1 tensor of which one rank's") as caught:
            made.save(1, differing(launch, 1))
        assert text in str(caught.value)
        assert gathered(launch, str(caught.value)) == [str(caught.value)] * launch.size
        assert saved(launch, made, [2]) == [2]


@takes_several
def case_replicas_that_differ_are_saved_with_a_warning_of_rank_0(launch: Launch) -> None:
    events: list[Event] = []
    options = {"check_replicas": "warn", "check_replicas_every": 2, "on_event": events.append}
    with manager_of(launch, **options) as made, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in (1, 2, 3):
            assert made.save(step, differing(launch, step))
    named = [w for w in caught if "model.w has one value" in str(w.message)]
    assert len(named) == (2 if launch.rank == 0 else 0)
    # Every other save is looked at.
    assert [event.step for event in events if event.kind == "differing_replicas"] == [1, 3]
    dist.barrier()
    assert made.all_steps() == [1, 2, 3]


def case_replicas_that_agree_are_saved_without_a_word(launch: Launch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with manager_of(launch, check_replicas="error", check_replicas_every=1) as made:
            assert saved(launch, made, [1, 2]) == [1, 2]


# --- looking on ----------------------------------------------------------------------------------


@takes_several
def case_one_rank_may_look_on_alone(launch: Launch) -> None:
    run_of(launch, [1, 2])
    if is_last(launch):
        with CheckpointManager(launch.path("run"), read_only=True) as made:
            assert made.all_steps() == [1, 2]
            assert made.wait_for_new_step(1, timeout=LIMIT) == 2
            assert made.verify(2).ok
            assert (step_path(launch, 2) / MARKER_NAME).exists()


CASES = {
    name.removeprefix("case_"): case
    for name, case in list(globals().items())
    if name.startswith("case_")
}

if __name__ == "__main__":
    cases.main(Path(sys.argv[2]), Path(sys.argv[1]), sys.argv[3:], CASES)
