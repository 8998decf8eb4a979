"""CheckpointManager on ranks: steps that are saved, deleted and restored."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from errno import EROFS
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from tests.distributed.background import replaced
from tests.distributed.cases import Launch
from tests.distributed.launcher import on, on_ranks, takes_several
from tests.distributed.managers import (
    PATIENCE,
    NoState,
    failures_of,
    is_last,
    manager_of,
    restored,
    run_of,
    saved,
    state_of,
)
from tests.fault_hooks import at_fault_points, failing
from tests.gates import LIMIT
from tests.support import data_files, flip_bit
from torch_ckpt import CheckpointError, CheckpointManager, LoadMismatch, PerRank, Retention
from torch_ckpt.checkpoint import marker
from torch_ckpt.errors import NotCommitted
from torch_ckpt.events import Event
from torch_ckpt.manager import SaveOptions, restoring
from torch_ckpt.multihost import RanksDisagree
from torch_ckpt.steps import MARKER_NAME


def step_path(launch: Launch, step: int) -> Path:
    return launch.path("run", f"{step:010d}")


# --- saving and restoring -------------------------------------------------------------------------


@on(1, 2)
def case_all_ranks_continue_at_the_last_step(launch: Launch) -> None:
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
    written = marker.read_marker(info.path)
    assert written is not None
    assert written["ranks"] == launch.size


def case_options_that_the_first_saves_refuse_are_refused_on_all_ranks(launch: Launch) -> None:
    run_of(launch, [1, 2, 3])
    with manager_of(launch, keep=Retention(keep_best=1, best_metric="los")) as made:
        with pytest.raises(FileExistsError, match="has steps up to 3"):
            made.save(3, state_of(launch, 3))
        assert restored(launch, made) == 3
        # Only rank 0's metrics are used.
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


def case_rank_0_deletes_for_all_ranks(launch: Launch) -> None:
    events: list[Event] = []
    with manager_of(launch, keep=2, on_event=events.append) as made:
        saved(launch, made, range(1, 6))
    dist.barrier()
    assert made.all_steps() == [4, 5]
    deleted = [event.step for event in events if event.kind == "deleted"]
    assert deleted == ([1, 2, 3] if launch.rank == 0 else [])


@takes_several
def case_ranks_restore_the_newest_step_of_rank_0(launch: Launch) -> None:
    run_of(launch, [1, 2, 3])
    with manager_of(launch) as made:
        found = made.steps()
        # As on file systems that show new files of other machines late.
        seen = found[:2] if launch.rank == 0 else found[launch.rank % 3 :]
        made._store.entries = lambda **_: seen  # type: ignore[method-assign]
        assert restored(launch, made) == 2


def case_all_ranks_fall_back_to_an_older_step_until_all_are_damaged(launch: Launch) -> None:
    run_of(launch, [1, 2, 3])
    if launch.rank == 0:
        file = sorted(data_files(step_path(launch, 3)))[-1]
        flip_bit(file, file.stat().st_size // 2, 5)
    dist.barrier()
    events: list[Event] = []
    with manager_of(launch, on_event=events.append) as made:
        assert restored(launch, made) == 2
    assert [(event.kind, event.step) for event in events] == [("damaged", 3), ("restored", 2)]
    dist.barrier()
    if launch.rank == 0:
        for step in (1, 2):
            (step_path(launch, step) / ".metadata").write_bytes(b"nothing")
    dist.barrier()
    with (
        manager_of(launch) as made,
        pytest.raises(CheckpointError, match=r"no step in .* can be loaded"),
    ):
        made.restore(state_of(launch, 0))


@contextmanager
def not_found(launch: Launch, made: CheckpointManager, times: int) -> Iterator[None]:
    """Hides step 2 on the last rank, for ``times`` lookups."""
    path_of = made._store.path_of  # type: ignore[attr-defined]
    left = [times if is_last(launch) else 0]

    def path_once(step: int) -> str:
        if step == 2 and left[0] > 0:
            left[0] -= 1
            return f"{path_of(step)}-away"
        return str(path_of(step))

    retries = replaced(restoring, "_RETRY_SECONDS", (0.01,) * 3)
    with replaced(made._store, "path_of", path_once), retries:
        yield


@takes_several
def case_ranks_wait_for_a_step_that_one_rank_does_not_find(launch: Launch) -> None:
    run_of(launch, [1, 2])
    with manager_of(launch) as made:
        with not_found(launch, made, 2):
            assert restored(launch, made) == 2
        # The step is not skipped.
        with not_found(launch, made, 100):
            failures = failures_of(lambda: made.restore(state_of(launch, 0)))
    assert list(failures) == [launch.size - 1]
    assert isinstance(failures[launch.size - 1], FileNotFoundError)


@takes_several
def case_ranks_that_save_different_steps_raise(launch: Launch) -> None:
    with manager_of(launch, on_save_error="warn_and_continue") as made:
        made.save(10 + is_last(launch), state_of(launch, 1))
        made.wait_until_finished()
        assert made.save_errors == 1
        assert made.all_steps() == []
        dist.barrier()
        assert saved(launch, made, [20]) == [20]
    assert manager_sees(launch) == [20]


@takes_several
def case_a_root_in_another_directory_on_one_rank_gives_no_step(launch: Launch) -> None:
    def move(operation: str, path: str) -> None:
        """Moves the files of this rank, as if the path were on a local disk of this rank."""
        if operation == "files are written":
            for file in Path(path).glob(f"__{launch.rank}_*"):
                file.rename(launch.path(f"elsewhere-{file.name}"))

    is_apart = at_fault_points(move)
    with manager_of(launch) as made, is_apart if is_last(launch) else nullcontext():
        made._store.patience = 0.1
        made.save(1, state_of(launch, 1))
        failures = failures_of(made.wait_until_finished)
        assert isinstance(failures[0], NotCommitted)
        assert "all ranks must see the same directory" in str(failures[0])
    assert manager_sees(launch) == []


def manager_sees(launch: Launch) -> list[int]:
    """Returns the complete steps once all ranks have arrived."""
    dist.barrier()
    return CheckpointManager(launch.path("run"), read_only=True).all_steps()


@takes_several
def case_the_next_save_succeeds_after_any_early_error_on_one_rank(launch: Launch) -> None:
    errors = (CheckpointException("test", {}), RuntimeError("test"), ValueError("test"))
    with manager_of(launch, on_save_error="warn_and_continue") as made:
        for step, error in enumerate(errors, 1):

            def fail(error: BaseException = error) -> None:
                raise error

            handle = made.before_save(fail) if is_last(launch) else None
            with suppress(ValueError):
                made.save(step, state_of(launch, step))
            made.wait_until_finished()
            if handle is not None:
                handle.remove()
            dist.barrier()
        before = made.save_errors
        unreadable = {"loader": NoState()} if is_last(launch) else {}
        assert made.save(4, state_of(launch, 4) | unreadable) == (not is_last(launch))
        made.wait_until_finished()
        assert made.save_errors == before + 1
        assert made.last_step is None
        assert saved(launch, made, [9]) == [9]
        made.wait_until_finished()
        assert restored(launch, made) == 9
    assert manager_sees(launch) == [9]


@takes_several
def case_warnings_as_errors_keep_the_ranks_in_step(launch: Launch) -> None:
    with manager_of(
        launch, saves=SaveOptions(check_replicas="warn", check_replicas_every=1)
    ) as made:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in (1, 2):
                state = state_of(launch, step)
                # Saves of earlier cases cause a warning, too.
                state["common"] += 100 + launch.rank
                assert made.save(step, state)
        made.wait_until_finished()
    with manager_of(launch) as made, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert made.restore(state_of(launch, 0), 1) == 1


@takes_several
def case_a_directory_that_lacks_only_its_marker_is_named_by_rank_0(launch: Launch) -> None:
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
def case_an_error_of_rank_0_at_the_start_is_raised_on_all_ranks(launch: Launch) -> None:
    fails = failing("mkdir", EROFS) if launch.rank == 0 else nullcontext()
    with fails, pytest.raises((OSError, RuntimeError), match="Read-only file system"):
        CheckpointManager(launch.path("run"), preemption=None, timeout=PATIENCE)


def case_an_absent_step_is_refused_on_all_ranks(launch: Launch) -> None:
    run_of(launch, [1, 2])
    with manager_of(launch) as made:
        with pytest.raises(
            FileNotFoundError, match=r"7 does not exist; the complete steps are \[1, 2\]"
        ):
            made.restore(state_of(launch, 0), 7)
        assert restored(launch, made, 1) == 1


@takes_several
@on(2, 4)
def case_a_restore_that_one_rank_cannot_join_is_an_error_on_all(launch: Launch) -> None:
    run_of(launch, [1, 2])
    last = launch.size - 1
    with manager_of(launch) as made:
        with pytest.raises(RanksDisagree, match="ranks request different steps:") as caught:
            made.restore(state_of(launch, 0), 1 if is_last(launch) else 2)
        assert f"rank {last}: 1" in str(caught.value)
        # A state that does not fit.
        state = state_of(launch, 0)
        if is_last(launch):
            state["more"] = torch.zeros(3)
        causes = failures_of(lambda: made.restore(state))
        assert {rank: type(cause) for rank, cause in causes.items()} == {last: LoadMismatch}
        # A state that cannot be read.
        unreadable = state_of(launch, 0)
        if is_last(launch):
            unreadable["loader"] = NoState()
        causes = failures_of(lambda: made.restore(unreadable))
        assert {rank: type(cause) for rank, cause in causes.items()} == {last: CheckpointError}
        assert "loader: its state could not be read" in str(causes[last])
        assert restored(launch, made) == 2


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
@on(4)
def case_a_group_saves_without_the_other_ranks(launch: Launch) -> None:
    half = launch.size // 2
    groups = [dist.new_group([*range(n * half, n * half + half)]) for n in range(2)]
    number = launch.rank // half
    root = launch.path(f"half {number}")
    saves = SaveOptions(if_busy="skip", async_saves=False)
    with manager_of(launch, process_group=groups[number], saves=saves, root=root) as made:
        for step in range(1, 3 + number):
            assert made.save(step, {"w": torch.full((3,), float(step)), "own": PerRank(step)})
        state = {"w": torch.zeros(3), "own": PerRank(0)}
        assert made.restore(state) == 2 + number
        assert state["w"].tolist() == [2.0 + number] * 3
    dist.barrier()
    written = marker.read_marker(str(root / "0000000001"))
    assert written is not None
    assert written["ranks"] == half


# --- looking on -----------------------------------------------------------------------------------


@takes_several
def case_a_single_rank_can_read_the_steps(launch: Launch) -> None:
    run_of(launch, [1, 2])
    if is_last(launch):
        with CheckpointManager(launch.path("run"), read_only=True) as made:
            assert made.all_steps() == [1, 2]
            assert made.wait_for_new_step(1, timeout=LIMIT) == 2
            assert made.verify(2).ok
            assert (step_path(launch, 2) / MARKER_NAME).exists()


test_on_ranks = on_ranks(globals(), (1, 2, 4))
