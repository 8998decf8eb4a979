"""Background saves by several ranks: successive saves, and failures."""

from __future__ import annotations

import errno
from collections.abc import Callable
from concurrent.futures import wait as wait_for_futures
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import torch_ckpt
from tests.distributed.background import STAGINGS, Held, assert_saved, overwrite
from tests.distributed.cases import (
    PATIENCE_SECONDS,
    Launch,
    StateDict,
    assert_is_full_disk,
    everything,
    failure_of,
    full_disk_on,
    tensor_of,
)
from tests.distributed.launcher import on, on_ranks
from torch_ckpt import SourceChanged

# --- one save and the next ------------------------------------------------------------------------


class Probe:
    """Stateful that calls a function when its state is read."""

    def __init__(self, look: Callable[[], Any]) -> None:
        self.look = look
        self.seen: list[Any] = []

    def state_dict(self) -> StateDict:
        self.seen.append(self.look())
        return {"value": 1}

    def load_state_dict(self, state: StateDict) -> None:
        pass


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

    try:
        save()
    except dcp.CheckpointException as error:
        assert list(error.failures) == [1]  # noqa: PT017
    else:
        raise AssertionError("a rank saved without the one that had not seen its error")
    assert not (launch.path("2") / ".metadata").exists()
    save()
    assert_saved(launch, launch.path("2"))


# --- failures -------------------------------------------------------------------------------------


def case_a_source_changed_too_early_on_one_rank_fails_the_save_on_all(launch: Launch) -> None:
    for number, name in enumerate(("plain.3", "sharded.even rows", "old")):
        path = launch.path(str(number))
        state = everything(launch)
        writer = Held(path)
        handle = torch_ckpt.async_save(state, storage_writer=writer, staging="overlapped")
        if launch.rank == 1:
            value = state
            for key in name.split("."):
                value = value[int(key) if isinstance(value, list) else key]
            overwrite(value)
        writer.may_stage.set()
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


def case_a_failing_write_done_on_one_rank_publishes_nothing(launch: Launch) -> None:
    path = launch.path()

    def write_done() -> None:
        if launch.rank == 1:
            raise OSError(errno.EIO, "on purpose")

    handle = torch_ckpt.async_save(everything(launch), path, write_done=write_done)
    causes = failure_of(launch, lambda: handle.result(PATIENCE_SECONDS))
    assert {rank: type(cause) for rank, cause in causes.items()} == {1: OSError}
    assert list(path.iterdir()) == []


@on(2, 4)
def case_a_failing_state_dict_on_one_rank_fails_the_save_on_all(launch: Launch) -> None:
    def fail() -> None:
        if launch.rank == 1:
            raise KeyError("on purpose")

    for staging in STAGINGS:
        path = launch.path(staging)
        state = {"failing": Probe(fail), "t": tensor_of("t", 5)}
        try:
            # The other ranks do not wait for the timeout.
            handle = torch_ckpt.async_save(state, path, staging=staging, timeout=1e6)
            handle.result(PATIENCE_SECONDS)
        except KeyError as error:
            # Rank 1 raises its own error if that is known before the save starts.
            if launch.rank != 1 or isinstance(error, dcp.CheckpointException):
                assert isinstance(error, dcp.CheckpointException)  # noqa: PT017
                assert [rank for rank in error.failures] == [1]  # noqa: PT017
                assert "on purpose" in str(error)  # noqa: PT017
        else:
            raise AssertionError("nothing was raised")
        assert not (path / ".metadata").exists()
        torch_ckpt.async_save(everything(launch), path, staging=staging).result(PATIENCE_SECONDS)
        assert_saved(launch, path)


def case_ranks_that_disagree_about_a_tensor_fail_the_save_on_all(launch: Launch) -> None:
    path = launch.path()
    handle = torch_ckpt.async_save({"t": torch.zeros(3 + launch.rank % 2)}, path)
    causes = failure_of(launch, lambda: handle.result(PATIENCE_SECONDS))
    assert set(causes) == {0}
    assert "rank 0 has torch.float32 [3], rank 1 has torch.float32 [4]" in str(causes[0])
    assert not (path / ".metadata").exists()


test_on_ranks = on_ranks(globals())
