"""Tests of AsyncCheckpoint: numbered background writes, and reading them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import torch_ckpt
from tests.fault_hooks import before
from tests.gates import Gate
from tests.support import assert_equal
from torch_ckpt import AsyncCheckpoint, CheckpointError
from torch_ckpt.training.async_checkpoint import AsyncCheckpointOptions

pytestmark = pytest.mark.usefixtures("without_warnings")


def weights(value: float) -> nn.Linear:
    layer = nn.Linear(3, 2)
    nn.init.constant_(layer.weight, value)
    nn.init.constant_(layer.bias, value)
    return layer


# --- numbers -------------------------------------------------------------------------------------


def is_complete(path: str) -> bool:
    return Path(path, ".metadata").exists()


def test_saves_are_numbered_from_1_and_writes_have_no_number(tmp_path: Path) -> None:
    checkpoint = AsyncCheckpoint(model=weights(1))
    checkpoint.sync()
    paths = [
        checkpoint.save(tmp_path / "ckpt"),
        checkpoint.write(tmp_path / "here"),
        checkpoint.save(tmp_path / "ckpt"),
    ]
    checkpoint.sync()
    assert paths == [f"{tmp_path}/{name}" for name in ("ckpt-1", "here", "ckpt-2")]
    assert all(is_complete(path) for path in paths)
    assert checkpoint.save_counter == 2


def test_numbers_continue_after_a_restore_and_not_after_a_read(tmp_path: Path) -> None:
    checkpoint = AsyncCheckpoint(model=weights(1))
    for _ in range(3):
        path = checkpoint.save(tmp_path / "ckpt")
    checkpoint.sync()
    fresh = AsyncCheckpoint(model=weights(0))
    fresh.read(path)
    assert fresh.save_counter == 0
    assert_equal(fresh.state["model"].state_dict(), weights(1).state_dict())
    fresh.restore(path)
    assert fresh.save(tmp_path / "ckpt") == f"{tmp_path}/ckpt-4"
    fresh.sync()


def test_a_checkpoint_of_save_can_be_read_without_a_counter_and_restored_with_one(
    tmp_path: Path,
) -> None:
    state = {"model": weights(5).state_dict(), "step": 8}
    torch_ckpt.save(state, tmp_path / "without")
    torch_ckpt.save({**state, "save_counter": 3}, tmp_path / "with")
    fresh = AsyncCheckpoint(model=weights(0), step=0)
    fresh.read(tmp_path / "without")
    assert (fresh.step, fresh.save_counter) == (8, 0)
    fresh.restore(tmp_path / "with")
    assert_equal(fresh.model.state_dict(), weights(5).state_dict())
    assert fresh.save_counter == 3


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


@pytest.mark.parametrize("given", [{"model": 1}, weights(1)])
def test_values_must_be_passed_by_keyword(given: Any) -> None:
    match = rf"got a {type(given).__name__} .*\. Pass .*: AsyncCheckpoint\(model=model\)"
    with pytest.raises(TypeError, match=match):
        AsyncCheckpoint(given)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("write", r"write must be a torch_ckpt\.WriteOptions"),
        ("read", r"read must be a torch_ckpt\.ReadOptions"),
    ],
)
def test_options_of_another_type_are_refused(name: str, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        AsyncCheckpointOptions(**{name: {}})


def test_the_options_apply_to_writes_and_restores(tmp_path: Path) -> None:
    options = AsyncCheckpointOptions(
        write=torch_ckpt.WriteOptions(overwrite=False), read=torch_ckpt.ReadOptions(zero_fill=True)
    )
    checkpoint = AsyncCheckpoint(options, t=torch.ones(2))
    checkpoint.write(tmp_path / "c")
    checkpoint.sync()
    checkpoint.write(tmp_path / "c")
    with pytest.raises(CheckpointException, match="already"):
        checkpoint.sync()
    fresh = AsyncCheckpoint(options, model=weights(1))
    torch_ckpt.save({"model": {"weight": torch.ones(1, 3), "bias": torch.ones(2)}}, tmp_path / "s")
    fresh.read(tmp_path / "s")
    assert fresh.model.weight.tolist() == [[1, 1, 1], [0, 0, 0]]


@pytest.mark.parametrize("name", ["read", "restore"])
def test_reading_waits_for_a_running_write(
    tmp_path: Path, name: str, held_before_commit: Gate
) -> None:
    model = weights(3)
    checkpoint = AsyncCheckpoint(model=model)
    path = checkpoint.save(tmp_path / "ckpt")
    held_before_commit.wait()
    nn.init.constant_(model.weight, 9)
    # Without the wait, the read would find no checkpoint.
    with before("wait for the save before", held_before_commit.open, path):
        getattr(checkpoint, name)(path)
    assert_equal(model.state_dict(), weights(3).state_dict())


def test_a_restore_works_after_a_failed_write(tmp_path: Path) -> None:
    torch_ckpt.save({"model": weights(3).state_dict(), "save_counter": 1}, tmp_path / "good")
    checkpoint = failed_write(tmp_path)
    checkpoint.restore(tmp_path / "good")
    assert_equal(checkpoint.model.state_dict(), weights(3).state_dict())
    with pytest.raises(CheckpointException):
        checkpoint.sync()


# --- waiting and errors --------------------------------------------------------------------------


def test_sync_waits_no_longer_than_its_timeout(tmp_path: Path, held_before_commit: Gate) -> None:
    checkpoint = AsyncCheckpoint(model=weights(1))
    path = checkpoint.save(tmp_path / "ckpt")
    with pytest.raises(TimeoutError, match="ckpt-1 was not committed"):
        checkpoint.sync(timeout=0.01)
    held_before_commit.open()
    checkpoint.sync()
    assert is_complete(path)


def failed_write(tmp_path: Path) -> AsyncCheckpoint:
    checkpoint = AsyncCheckpoint(model=weights(1))
    (tmp_path / "file").touch()
    checkpoint.write(tmp_path / "file")
    return checkpoint


@pytest.mark.parametrize(
    "call",
    [lambda checkpoint, _path: checkpoint.sync(), AsyncCheckpoint.write],
    ids=["sync", "the next write"],
)
def test_the_error_of_a_failed_write_is_raised_once(
    tmp_path: Path, call: Callable[[AsyncCheckpoint, Path], object]
) -> None:
    checkpoint = failed_write(tmp_path)
    with pytest.raises(CheckpointException):
        call(checkpoint, tmp_path / "good")
    checkpoint.sync()
    checkpoint.write(tmp_path / "good")
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


# --- callbacks, hooks, guards --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["write", "save"])
def test_the_callback_gets_the_path_of_a_complete_checkpoint(tmp_path: Path, name: str) -> None:
    found: list[tuple[str, bool]] = []
    checkpoint = AsyncCheckpoint(model=weights(1))
    path = getattr(checkpoint, name)(
        tmp_path / "ckpt", on_commit=lambda path: found.append((path, is_complete(path)))
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


# --- metrics -------------------------------------------------------------------------------------


def test_metrics_have_the_durations_of_the_last_write(tmp_path: Path) -> None:
    checkpoint = AsyncCheckpoint(model=weights(1))
    assert checkpoint.metrics() is None
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
    assert second.save.total_s > 0
