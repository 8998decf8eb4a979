"""torch_ckpt.async_save: metrics, logs and traces, and the priority of its threads."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save

import torch_ckpt
from tests.background_saves import STAGINGS, assert_checkpoint, large, step, trained, unwritable
from tests.forked import answer_of, forked
from tests.gates import Gate
from tests.support import StateDict, data_files
from torch_ckpt import Background, CheckpointError
from torch_ckpt.options import CHUNK_BYTES

# torch warns of every checkpoint that is replaced.
pytestmark = [
    pytest.mark.usefixtures("no_save_left"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]


# --- metrics and traces --------------------------------------------------------------------------


@pytest.mark.parametrize("staging", STAGINGS)
@forked
def test_metrics_report_bytes_and_times_of_the_save(tmp_path: Path, staging: str) -> None:
    start = time.perf_counter()
    handle = torch_ckpt.async_save({"t": large()}, tmp_path / "c", staging=staging)
    returned = time.perf_counter() - start
    handle.result()
    took = time.perf_counter() - start
    metrics = handle.metrics()
    assert (metrics.path, metrics.rank) == (str(tmp_path / "c"), 0)
    assert metrics.bytes == sum(file.stat().st_size for file in data_files(tmp_path / "c"))
    assert 0 < metrics.blocked_s <= returned
    assert 0 < metrics.planning_s < metrics.written_s < metrics.total_s <= took
    assert 0 < metrics.staging_s < metrics.written_s
    assert 0 < metrics.commit_s <= metrics.total_s - metrics.written_s
    assert min(metrics.checksum_s, metrics.write_s, metrics.fsync_s) > 0
    assert 0 < metrics.python_s < took
    assert metrics.interval_s == 0


def test_the_interval_is_the_time_since_the_last_call(tmp_path: Path) -> None:
    start = time.perf_counter()
    torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "first").result()
    handle = torch_ckpt.async_save({"t": torch.zeros(3)}, tmp_path / "second")
    took = time.perf_counter() - start
    handle.result()
    assert 0 < handle.metrics().interval_s < took


def test_waits_for_staged_count_as_blocked(tmp_path: Path, opened_by_a_step: Gate) -> None:
    model, optimizer = trained(torch.optim.SGD)
    handle = torch_ckpt.async_save({"model": model}, tmp_path / "c", staging="overlapped")
    handle.guard(optimizer)
    before = handle.metrics().blocked_s
    step(model, optimizer)
    guarded = handle.metrics().blocked_s
    handle.wait_staged()
    assert before < guarded < handle.metrics().blocked_s
    handle.result()


def test_a_finished_save_is_one_log_record_and_a_failed_one_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="torch_ckpt"):
        failed = torch_ckpt.async_save({"t": torch.ones(3)}, unwritable(tmp_path))
        with pytest.raises(CheckpointException):
            failed.result()
        # With overlapped staging, the call returns before the save starts.
        handle = torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c", staging="overlapped")
        handle.result()
    [record] = [r for r in caplog.records if r.name == "torch_ckpt"]
    assert record.levelname == "INFO"
    assert re.match(rf"saved 0\.000 GB to {tmp_path}/c on rank 0 in ", record.getMessage())
    assert vars(record)["metrics"] == vars(handle.metrics())


# --- states that do not change -------------------------------------------------------------------


def training(step: int, model: float, optim: float = 0.0) -> StateDict:
    return {
        "model": {"w": torch.full((3, 3), model), "b": torch.full((3,), model)},
        "optim": {"moment": torch.full((3, 3), optim), "step": torch.tensor(step)},
    }


def warnings_of(tmp_path: Path, states: list[StateDict], **options: Any) -> list[str]:
    """Returns the warnings of saves of these states, the first saves of a process."""

    def save() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number, state in enumerate(states):
                torch_ckpt.async_save(state, tmp_path / f"c{number}", **options).result()
        return [text for w in caught if "bit for bit" in (text := str(w.message))]

    texts: list[str] = answer_of(save)
    return texts


def counting(tensors: Any) -> list[StateDict]:
    return [{"m": tensors, "step": n} for n in (1, 2)]


def optimizing(step: int, moment: float) -> StateDict:
    slots = {"exp_avg": torch.full((3,), moment), "step": torch.tensor(float(step))}
    return {"optim": {"state": {"w": slots}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}}


class _Stateful:
    def __init__(self, state: StateDict) -> None:
        self.state = state

    def state_dict(self) -> StateDict:
        return self.state

    def load_state_dict(self, state: StateDict) -> None:
        self.state = state


def loading(step: int) -> StateDict:
    """Makes the states of healthy loaders and generators, of which only numbers change."""
    loader = {
        "position": step,
        "order": torch.arange(9),
        "weights": torch.ones(9, dtype=torch.float64),
        "generator": torch.Generator().get_state(),
    }
    return {
        "loader": loader,
        "other loader": _Stateful(loader),
        "generator": torch.Generator().get_state(),
        "generators": {"cpu": torch.Generator().get_state()},
        "step": step,
    }


#: States of consecutive saves, and a pattern for each warning.
SEQUENCES: dict[str, tuple[list[StateDict], list[str]]] = {
    "weights do not change though steps are counted": (
        [training(1, 1.0, 1.0), training(2, 1.0, 2.0)],
        [".*/c1: model.w, model.b are bit for bit the same as.*although optim.step has changed"],
    ),
    "five of eight are named": (
        counting({f"t{i}": torch.ones(3) for i in range(8)}),
        [".*m.t3, m.t4 and 3 more are bit for bit"],
    ),
    "a plain number counts steps": (counting([torch.ones(3)]), [".*although step has changed"]),
    "a frozen group is named once": (
        [training(n, 1.0, float(n)) for n in range(4)],
        [".*/c1: model.w, model.b are"],
    ),
    "each group is named once": (
        [training(1, 1.0, 1.0), training(2, 1.0, 2.0), training(3, 1.0, 2.0)],
        [".*/c1: model.w, model.b are", ".*/c2: optim.moment are"],
    ),
    "an optimizer does not step": (
        [optimizing(1, 1.0), optimizing(2, 1.0)],
        [".*/c1: optim.state.w.exp_avg are"],
    ),
    "data loaders and generators do not change": ([loading(1), loading(2)], []),
    "they change": ([training(1, 1.0, 1.0), training(2, 2.0, 2.0)], []),
    "one of a group changes": (
        [{"m": {"a": torch.ones(3), "b": torch.ones(3) * n}, "step": n} for n in (1, 2)],
        [],
    ),
    "nothing changes": ([training(1, 1.0), training(1, 1.0)], []),
    "a tensor is new": ([training(1, 1.0), training(2, 1.0) | {"more": torch.ones(2)}], []),
    "a name is another": ([{"m": [torch.ones(3)], "s": 1}, {"n": [torch.ones(3)], "s": 2}], []),
}


@pytest.mark.parametrize("case", SEQUENCES)
def test_each_unchanged_group_is_named_once_if_steps_are_counted(tmp_path: Path, case: str) -> None:
    states, patterns = SEQUENCES[case]
    found = warnings_of(tmp_path, states)
    assert len(found) == len(patterns), found
    for warning, pattern in zip(found, patterns, strict=True):
        assert re.match(pattern, warning), warning


def test_the_warning_names_the_option_only_if_the_caller_has_it(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    found = warnings_of(tmp_path, [{"model": model, "step": n} for n in (1, 2)])
    assert found[0].endswith(
        "not the one being trained. Pass warn_unchanged=False to omit this warning"
    )

    def save() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with torch_ckpt.CheckpointManager(tmp_path / "run") as manager:
                for step in (1, 2):
                    manager.save(step, {"model": model, "step": step})
        return [str(w.message) for w in caught]

    (warning,) = answer_of(save)
    assert warning.endswith("the saved state is not the one being trained")


def test_the_warning_can_be_silenced(tmp_path: Path) -> None:
    states = [training(1, 1.0), training(2, 1.0)]
    assert warnings_of(tmp_path, states, warn_unchanged=False) == []


@forked
def test_a_warning_turned_into_an_error_reports_that_the_checkpoint_is_committed(
    tmp_path: Path,
) -> None:
    torch_ckpt.async_save(training(1, 1.0), tmp_path / "c1").result()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*bit for bit")
        handle = torch_ckpt.async_save(training(2, 1.0), tmp_path / "c2")
        with pytest.raises(CheckpointError, match=r"bit for bit .*c2 is committed$"):
            handle.result()
    assert_checkpoint(tmp_path / "c2", training(2, 1.0))


# --- priorities ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nice": 20}, "nice must be between 0 and 19, got 20"),
        ({"nice": -1}, "nice must be between 0 and 19, got -1"),
        ({"threads": -1}, "threads must not be negative, got -1"),
        ({"max_bytes_per_second": -1}, "max_bytes_per_second must not be negative, got -1"),
    ],
)
def test_invalid_background_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Background(**options)


def nice_of_threads() -> dict[int, int]:
    """Returns the niceness by thread id."""
    threads: list[str] = []
    # A thread that ends during the listing may hide another one from it.
    while threads != (again := sorted(os.listdir("/proc/self/task"))):
        threads = again
    found = {}
    for thread in threads:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            status = Path(f"/proc/self/task/{thread}/stat").read_text()
            # The name, in parentheses, may contain any character. "nice" is the 19th field.
            found[int(thread)] = int(status.rpartition(")")[2].split()[19 - 3])
    return found


def threads_of_a_save(path: Path, kind: str, own_nice: int) -> tuple[list[int], set[str]]:
    """Returns the niceness of a save's threads beyond the process's, counted, and I/O classes."""

    def save() -> tuple[list[int], set[str]]:
        warnings.simplefilter("ignore")
        os.setpriority(os.PRIO_PROCESS, 0, own_nice)
        own = os.getpriority(os.PRIO_PROCESS, 0)
        background = Background(nice=7, threads=3, max_bytes_per_second=32 << 20)
        options = torch_ckpt.WriteOptions(background=background)
        state = {"t": large(chunks=4)}
        if kind == "save":
            torch_ckpt.save(state, path, options=options)
        elif kind == "async_save":
            torch_ckpt.async_save(state, path, options=options).result()
        else:
            writer = torch_ckpt.FileSystemWriter(path, background=background)
            future: Any = dcp_async_save(state, storage_writer=writer, no_dist=True)
            future.result()
        # The engine's threads outlive the save. The thread that allocates the rest of the memory
        # after a fast save has the niceness 19, and is not a thread of the save.
        found = nice_of_threads().items()
        nicer = {thread: nice - own for thread, nice in found if own < nice < 19}
        classes = set()
        for thread in nicer if shutil.which("ionice") else ():
            command = ["ionice", "-p", str(thread)]
            classes.add(subprocess.run(command, capture_output=True, text=True).stdout.strip())
        return sorted(nicer.values()), classes

    found: tuple[list[int], set[str]] = answer_of(save)
    return found


@pytest.mark.parametrize(
    ("kind", "own_nice", "nicer_by"),
    [
        ("save", 0, []),
        ("async_save", 0, [7, 7, 7]),
        ("dcp.async_save", 0, [7, 7, 7]),
        ("async_save", 4, [3, 3, 3]),
        ("async_save", 9, []),
    ],
)
def test_the_threads_of_a_background_save_have_low_priority_unless_the_process_is_nicer(
    tmp_path: Path, kind: str, own_nice: int, nicer_by: list[int]
) -> None:
    nicer, classes = threads_of_a_save(tmp_path / "c", kind, own_nice)
    assert nicer == nicer_by
    assert classes <= {"idle"}


def test_the_bandwidth_is_limited(tmp_path: Path) -> None:
    slow = Background(max_bytes_per_second=32 << 20)
    state = {"t": large(chunks=4)}
    handle = torch_ckpt.async_save(
        state, tmp_path / "c", options=torch_ckpt.WriteOptions(thread_count=1, background=slow)
    )
    handle.result()
    # The last write starts after the time that the earlier writes are allowed.
    at_least = (handle.metrics().bytes - CHUNK_BYTES) / slow.max_bytes_per_second
    assert handle.metrics().written_s >= at_least
