"""Tests of AsyncCheckpoint: numbered background writes, and reading them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import torch_ckpt
from tests.fault_hooks import at_fault_points, before
from tests.forked import run_script
from tests.gates import Gate
from tests.support import assert_equal
from torch_ckpt.errors import CheckpointError
from torch_ckpt.training.async_checkpoint import AsyncCheckpoint


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def weights(value: float) -> nn.Linear:
    layer = nn.Linear(3, 2)
    nn.init.constant_(layer.weight, value)
    nn.init.constant_(layer.bias, value)
    return layer


# --- numbers -------------------------------------------------------------------------------------


def test_saves_are_numbered_from_1(tmp_path: Path) -> None:
    checkpoint = AsyncCheckpoint(model=weights(1))
    paths = [checkpoint.save(tmp_path / "ckpt") for _ in range(2)]
    checkpoint.sync()
    assert paths == [f"{tmp_path}/ckpt-1", f"{tmp_path}/ckpt-2"]
    assert all(Path(path, ".metadata").exists() for path in paths)


def test_a_write_uses_the_given_path_and_no_number(tmp_path: Path) -> None:
    checkpoint = AsyncCheckpoint(model=weights(1))
    path = checkpoint.write(tmp_path / "here")
    checkpoint.sync()
    assert path == str(tmp_path / "here")
    assert Path(path, ".metadata").exists()
    assert checkpoint.save_counter == 0


def test_numbers_continue_after_a_restore(tmp_path: Path) -> None:
    checkpoint = AsyncCheckpoint(model=weights(1))
    for _ in range(3):
        path = checkpoint.save(tmp_path / "ckpt")
    checkpoint.sync()
    fresh = AsyncCheckpoint(model=weights(0))
    fresh.restore(path)
    assert fresh.save(tmp_path / "ckpt") == f"{tmp_path}/ckpt-4"
    fresh.sync()


def test_a_read_keeps_the_counter(tmp_path: Path) -> None:
    checkpoint = AsyncCheckpoint(model=weights(1))
    path = checkpoint.save(tmp_path / "ckpt")
    checkpoint.sync()
    fresh = AsyncCheckpoint(model=weights(0))
    fresh.read(path)
    assert fresh.save_counter == 0
    assert_equal(fresh.state["model"].state_dict(), weights(1).state_dict())


def test_a_checkpoint_without_a_counter_can_be_read(tmp_path: Path) -> None:
    torch_ckpt.save({"model": weights(5).state_dict(), "step": 8}, tmp_path)
    fresh = AsyncCheckpoint(model=weights(1), step=0)
    fresh.read(tmp_path)
    assert (fresh.state["step"], fresh.save_counter) == (8, 0)


def test_a_value_cannot_have_the_name_of_the_counter() -> None:
    with pytest.raises(ValueError, match="save_counter"):
        AsyncCheckpoint(save_counter=1)


# --- reading -------------------------------------------------------------------------------------


def test_values_are_attributes(tmp_path: Path) -> None:
    checkpoint = AsyncCheckpoint(model=weights(1), step=1)
    checkpoint.step += 4
    checkpoint.epoch = 2
    checkpoint.write(tmp_path / "c")
    checkpoint.sync()
    again = AsyncCheckpoint(model=weights(0), step=0, epoch=0)
    again.restore(tmp_path / "c")
    assert (again.step, again.epoch) == (5, 2)
    assert again.model is again.state["model"]


def test_an_unknown_value_is_an_attribute_error() -> None:
    with pytest.raises(
        AttributeError, match=r"no value 'modle'\. Its values are model, save_counter"
    ):
        _ = AsyncCheckpoint(model=weights(1)).modle


@pytest.mark.parametrize("name", ["save", "save_counter"])
def test_its_own_attributes_cannot_be_set(name: str) -> None:
    checkpoint = AsyncCheckpoint(model=weights(1))
    with pytest.raises(AttributeError, match=f"{name} is an attribute of AsyncCheckpoint itself"):
        setattr(checkpoint, name, 3)


@pytest.mark.parametrize("given", [{"model": weights(1)}, weights(1)], ids=["dict", "module"])
def test_values_must_be_passed_by_keyword(given: Any) -> None:
    with pytest.raises(TypeError, match=r"keywords: AsyncCheckpoint\(model=model\)"):
        AsyncCheckpoint(given)


def test_a_restore_works_before_the_first_save(tmp_path: Path) -> None:
    torch_ckpt.save({"model": weights(5).state_dict(), "save_counter": 8}, tmp_path)
    fresh = AsyncCheckpoint(model=weights(0))
    fresh.restore(tmp_path)
    assert_equal(fresh.state["model"].state_dict(), weights(5).state_dict())
    assert fresh.save_counter == 8


@pytest.mark.parametrize("name", ["read", "restore"])
def test_reading_waits_for_a_running_write(tmp_path: Path, name: str, gate: Gate) -> None:
    model = weights(3)
    checkpoint = AsyncCheckpoint({"write_done": gate}, model=model)
    path = checkpoint.save(tmp_path / "ckpt")
    gate.wait()
    nn.init.constant_(model.weight, 9)
    # Without the wait, the read would find no checkpoint.
    with before("wait for the save before", gate.open, path):
        getattr(checkpoint, name)(path)
    assert_equal(model.state_dict(), weights(3).state_dict())


def test_plain_values_are_replaced_in_the_state(tmp_path: Path) -> None:
    checkpoint = AsyncCheckpoint(epoch=7)
    path = checkpoint.save(tmp_path / "ckpt")
    checkpoint.sync()
    fresh = AsyncCheckpoint(epoch=0)
    fresh.restore(path)
    assert fresh.state["epoch"] == 7


def test_a_restore_works_after_a_failed_write(tmp_path: Path) -> None:
    checkpoint = AsyncCheckpoint(model=weights(3))
    path = checkpoint.save(tmp_path / "ckpt")
    checkpoint.sync()
    (tmp_path / "file").touch()
    checkpoint.write(tmp_path / "file")
    nn.init.zeros_(checkpoint.state["model"].weight)
    checkpoint.restore(path)
    assert_equal(checkpoint.state["model"].state_dict(), weights(3).state_dict())
    with pytest.raises(CheckpointException):
        checkpoint.sync()


# --- waiting and errors --------------------------------------------------------------------------


def test_a_write_saves_a_snapshot_of_the_state(tmp_path: Path) -> None:
    gate = Gate()
    model = weights(3)
    checkpoint = AsyncCheckpoint({"write_done": gate}, model=model)
    path = checkpoint.save(tmp_path / "ckpt")
    nn.init.constant_(model.weight, 9)
    gate.open()
    checkpoint.sync()
    fresh = AsyncCheckpoint(model=weights(0))
    fresh.restore(path)
    assert_equal(fresh.state["model"].state_dict(), weights(3).state_dict())


def test_sync_waits_no_longer_than_its_timeout(tmp_path: Path) -> None:
    gate = Gate()
    checkpoint = AsyncCheckpoint({"write_done": gate}, model=weights(1))
    checkpoint.save(tmp_path / "ckpt")
    with pytest.raises(TimeoutError, match="ckpt-1 was not committed"):
        checkpoint.sync(timeout=0.01)
    gate.open()
    checkpoint.sync()
    assert (tmp_path / "ckpt-1" / ".metadata").exists()


def test_sync_before_the_first_write_returns() -> None:
    AsyncCheckpoint(model=weights(1)).sync()


def test_sync_raises_the_error_of_a_failed_write_once(tmp_path: Path) -> None:
    checkpoint = AsyncCheckpoint(model=weights(1))
    (tmp_path / "file").touch()
    checkpoint.write(tmp_path / "file")
    with pytest.raises(CheckpointException):
        checkpoint.sync()
    checkpoint.sync()
    checkpoint.write(tmp_path / "good")
    checkpoint.sync()


def test_the_next_write_raises_the_unreported_error_of_a_failed_write(tmp_path: Path) -> None:
    checkpoint = AsyncCheckpoint(model=weights(1))
    (tmp_path / "file").touch()
    checkpoint.write(tmp_path / "file")
    with pytest.raises(CheckpointException):
        checkpoint.write(tmp_path / "good")
    # The error is raised once only.
    checkpoint.sync()


def test_an_unreadable_state_is_an_error_of_the_write(tmp_path: Path) -> None:
    checkpoint = AsyncCheckpoint(model=weights(1))

    def fail() -> None:
        raise RuntimeError("the cache is gone")

    handle = checkpoint.before_save(fail)
    with pytest.raises(RuntimeError, match="the cache is gone"):
        checkpoint.save(tmp_path / "ckpt")
    handle.remove()
    assert checkpoint.save(tmp_path / "ckpt") == f"{tmp_path}/ckpt-2"
    checkpoint.sync()


def test_the_interpreter_waits_for_the_write_at_exit(tmp_path: Path) -> None:
    program = f"""
import torch
from torch_ckpt.training.async_checkpoint import AsyncCheckpoint
checkpoint = AsyncCheckpoint(w=torch.ones(1 << 22))
checkpoint.save({str(tmp_path / "ckpt")!r})
"""
    done = run_script(program)
    assert done.returncode == 0, done.stderr
    fresh = AsyncCheckpoint(w=torch.zeros(1 << 22))
    fresh.restore(tmp_path / "ckpt-1")
    assert_equal(fresh.state["w"], torch.ones(1 << 22))


# --- callbacks, hooks, guards --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["write", "save"])
def test_the_callback_gets_the_path_of_a_complete_checkpoint(tmp_path: Path, name: str) -> None:
    found: list[tuple[str, bool]] = []
    checkpoint = AsyncCheckpoint(model=weights(1))
    path = getattr(checkpoint, name)(
        tmp_path / "ckpt", on_commit=lambda p: found.append((p, Path(p, ".metadata").exists()))
    )
    checkpoint.sync()
    assert found == [(path, True)]


def test_an_error_of_the_callback_is_raised_and_the_checkpoint_stays(tmp_path: Path) -> None:
    checkpoint = AsyncCheckpoint(epoch=3)

    def fail(_path: str) -> None:
        raise RuntimeError("no network")

    path = checkpoint.save(tmp_path / "ckpt", on_commit=fail)
    with pytest.raises(CheckpointError, match="no network"):
        checkpoint.sync()
    checkpoint.state["epoch"] = 0
    checkpoint.restore(path)
    assert checkpoint.state["epoch"] == 3


def test_hooks_run_at_each_write_until_removed(tmp_path: Path) -> None:
    called: list[int] = []
    checkpoint = AsyncCheckpoint(model=weights(1))
    handle = checkpoint.before_save(lambda: called.append(checkpoint.save_counter))
    checkpoint.save(tmp_path / "ckpt")
    checkpoint.save(tmp_path / "ckpt")
    handle.remove()
    checkpoint.save(tmp_path / "ckpt")
    checkpoint.sync()
    assert called == [1, 2]


def test_an_overlapped_write_guards_the_optimizers(tmp_path: Path, gate: Gate) -> None:
    model = weights(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint = AsyncCheckpoint({"staging": "overlapped"}, model=model, optimizer=optimizer)

    def hook(operation: str, _path: str) -> None:
        if operation == "background save begins":
            gate()
        elif operation == "wait until staged":
            gate.open()

    with at_fault_points(hook):
        checkpoint.save(tmp_path / "ckpt")
        gate.wait()
        # The gate opens only while the step waits.
        optimizer.step()
        checkpoint.sync()


# --- metrics -------------------------------------------------------------------------------------


def test_there_are_no_metrics_before_the_first_write() -> None:
    assert AsyncCheckpoint().metrics() is None


def test_metrics_have_the_durations_of_the_last_write(tmp_path: Path) -> None:
    checkpoint = AsyncCheckpoint(model=weights(1))
    checkpoint.save(tmp_path / "ckpt")
    first = checkpoint.metrics()
    checkpoint.sync()
    path = checkpoint.save(tmp_path / "ckpt")
    checkpoint.sync()
    second = checkpoint.metrics()
    assert first is not None
    assert second is not None
    assert first.training_s == 0
    assert second.training_s > 0
    assert second.save.path == path
    assert second.blocked_s >= second.save.blocked_s > 0
    assert second.write_s == second.save.total_s > 0
