"""Exceptions that a save or load raises on all ranks if it fails on some."""

from __future__ import annotations

import copy
import errno
import pickle
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

import torch_ckpt
from tests.rank_threads import ranks_of, save, together
from torch_ckpt import CheckpointError
from torch_ckpt.errors import NotCommitted
from torch_ckpt.ranks.failures import CheckpointFailed, capture_exceptions, failed_on

NOTHING = traceback.StackSummary()


def fails() -> None:
    raise OSError("of this line")


def test_the_stack_of_a_failed_rank_ends_at_the_raising_line() -> None:
    _, stack = capture_exceptions(fails)
    last = stack[-1]
    assert (last.filename, last.name) == (__file__, "fails")
    assert last.lineno == fails.__code__.co_firstlineno + 1


def raised(*causes: BaseException) -> CheckpointFailed:
    """Returns the exception that is raised if ranks 1, 2, ... fail with these causes."""
    return failed_on("plan", {rank: (cause, NOTHING) for rank, cause in enumerate(causes, 1)})


class NeedsMore(RuntimeError):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")
        self.one = one


MISMATCH = torch_ckpt.LoadMismatch("it does not fit", torch_ckpt.LoadReport(missing=["a"]))


class OwnObjects(RuntimeError):
    def __new__(cls, one: int) -> OwnObjects:
        return super().__new__(cls, one)


@pytest.mark.parametrize(
    ("cause", "attributes"),
    [
        (torch_ckpt.Corrupt("a file is damaged"), {}),
        (MISMATCH, {"report": MISMATCH.report}),
        (NotCommitted("rename failed", errno.ENOSPC), {}),
        (FileNotFoundError(errno.ENOENT, "there is none", "/ckpt"), {"filename": "/ckpt"}),
        (PermissionError(errno.EACCES, "no", "/ckpt"), {"errno": errno.EACCES}),
        (KeyError("name"), {}),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), {"start": 0}),
        (torch.OutOfMemoryError("none left"), {}),
        (NeedsMore(1, 2), {"one": 1}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_failure_on_a_rank_is_caught_by_its_type_and_bases_with_its_attributes(
    cause: Exception, attributes: dict[str, Any]
) -> None:
    for kind in (type(cause), torch_ckpt.CheckpointError, CheckpointException, Exception):
        with pytest.raises(kind) as caught:
            raise raised(cause)
        assert caught.value.failures == {1: (cause, NOTHING)}
        assert str(caught.value) == f"rank 1: {type(cause).__name__}: {cause}"
        for name, value in attributes.items():
            assert getattr(caught.value, name) is value


def test_the_first_rank_determines_the_type_and_all_causes_are_listed() -> None:
    error = raised(torch_ckpt.Corrupt("one"), FileNotFoundError(2, "two", "/ckpt"))
    assert isinstance(error, torch_ckpt.Corrupt)
    assert not isinstance(error, OSError)
    assert list(error.failures) == [1, 2]


@pytest.mark.parametrize(
    "twin", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))]
)
def test_the_exception_can_be_copied_and_pickled(twin: Any) -> None:
    error: Any = raised(FileNotFoundError(errno.ENOENT, "there is none", "/ckpt"), KeyError("b"))
    other = twin(error)
    assert isinstance(other, FileNotFoundError)
    assert isinstance(other, CheckpointFailed)
    assert (other.errno, other.filename, str(other)) == (error.errno, error.filename, str(error))
    assert list(other.failures) == [1, 2]


@pytest.mark.parametrize(
    "cause", [KeyboardInterrupt(), SystemExit(3), StopIteration(), OwnObjects(1)], ids=repr
)
def test_a_cause_whose_type_cannot_be_used_is_named(cause: BaseException) -> None:
    error = raised(cause)
    assert type(error) is CheckpointFailed
    assert type(cause).__name__ in str(error)


def test_a_nested_failure_has_the_type_of_its_own_cause() -> None:
    of_torch = CheckpointException("read", {0: (PermissionError(13, "no", "/x"), NOTHING)})
    error: Any = raised(of_torch)
    assert isinstance(error, PermissionError)
    assert error.filename == "/x"
    assert isinstance(raised(raised(torch_ckpt.Corrupt("x"))), torch_ckpt.Corrupt)
    assert type(raised(CheckpointException("none", {}))) is CheckpointFailed


def test_ranks_with_the_same_cause_are_named_together() -> None:
    assert str(raised(*[KeyError("x") for _ in range(512)])) == "ranks 1-512: KeyError: 'x'"


def test_many_different_causes_are_not_all_printed() -> None:
    lines = str(raised(*[KeyError(number) for number in range(512)])).splitlines()
    assert lines[-1] == "ranks 5-512: other causes (see the attribute `failures`)"
    assert len(lines) == 5


def test_a_cause_in_the_callers_code_is_reported_with_file_and_line() -> None:
    class Broken:
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("the cache is gone")

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    with pytest.raises(CheckpointError) as caught:
        torch_ckpt.save({"cache": Broken()}, "never")
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "rank 0: CheckpointError: cache: its state could not be read on rank 0: the cache is gone"
    )
    assert __file__ in lines[-1]
    assert "in state_dict" in lines[-1]


def test_a_wrong_path_prints_few_lines_and_the_last_has_the_advice(tmp_path: Path) -> None:
    file, wrong = tmp_path / "train.py", str(tmp_path / "wrong")
    file.write_text(
        "import torch, torch_ckpt\n"
        f"torch_ckpt.load({{'a': torch.zeros(2)}},\n                {wrong!r})\n"
    )
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, check=False)
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert len(lines) <= 12
    assert "no committed checkpoint: there is no such directory" in lines[-1]
    assert wrong in lines[-1]


def test_results_of_background_saves_are_caught_by_type(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    handle = torch_ckpt.async_save({"a": torch.zeros(2)}, tmp_path / "file" / "ck")
    with pytest.raises(FileExistsError) as caught:
        handle.result()
    assert caught.value.filename is not None


def test_exceptions_of_dcp_within_our_calls_are_raised_as_ours(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    state = {"a": torch.zeros(2)}
    with pytest.raises(FileExistsError):
        torch_ckpt.save(state, tmp_path / "file" / "ck", planner=DefaultSavePlanner())
    # torch's planner states the exception of its reader only as text.
    with pytest.raises(torch_ckpt.CheckpointError, match="metadata"):
        torch_ckpt.load(state, tmp_path / "none", planner=DefaultLoadPlanner())
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, storage_reader=torch_ckpt.FileSystemReader(tmp_path / "none"))
    assert not isinstance(caught.value, Exception)


@pytest.mark.parametrize("interrupted", [0, 1])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_rank_raises_the_interrupt_and_the_others_name_it(
    interrupted: int, kind: type[BaseException]
) -> None:
    def one(ranks: Any) -> Any:
        def local() -> None:
            if ranks.rank == interrupted:
                raise kind

        return save(ranks, local)

    outcomes = together(ranks_of(dist.HashStore(), 2), one)
    assert type(outcomes[interrupted]) is kind
    other = outcomes[1 - interrupted]
    assert type(other) is CheckpointFailed
    assert str(other).startswith(f"rank {interrupted}: {kind.__name__}")


def test_an_interrupted_save_of_one_process_raises_the_interrupt() -> None:
    def interrupt() -> dict[str, Any]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        torch_ckpt.save(interrupt, "never")
