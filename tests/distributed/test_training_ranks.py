"""Logging, profiling and drawing on several ranks."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.fx import Graph

from tests.distributed.cases import Launch, dtensors, mesh_1d, tensor_of
from tests.distributed.launcher import on_ranks
from tests.support import no_warnings
from torch_ckpt import PerRank
from torch_ckpt.training import (
    load_checkpoint_if_it_exists,
    log,
    mkdir,
    save_checkpoint,
    save_graph,
    start_profile,
    stop_profile,
)


class Recorded:
    """Stores what a SummaryWriter would receive."""

    def __init__(self) -> None:
        self.scalars: dict[str, float] = {}
        self.histograms: dict[str, torch.Tensor] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars[tag] = scalar_value

    def add_histogram(self, tag: str, values: torch.Tensor, global_step: int) -> None:
        self.histograms[tag] = values


@contextlib.contextmanager
def refused_on(ranks: range, error: type[Exception], match: str) -> Iterator[None]:
    """Checks that ranks refuse a call, and that the other ranks are not blocked."""
    if dist.get_rank() in ranks:
        with pytest.raises(error, match=match):
            yield
    else:
        yield


def total_of_ranks(launch: Launch) -> DTensor:
    """Makes a partial tensor: 1 on rank 0, 2 on rank 1, ..., to be summed."""
    return DTensor.from_local(torch.tensor(launch.rank + 1.0), mesh_1d(launch), [Partial()])


# --- logs ----------------------------------------------------------------------------------------


def case_rank_0_logs_full_tensors_and_totals(launch: Launch) -> None:
    logger = Recorded()
    state = dtensors(mesh_1d(launch))
    log(1, logger, {**state, "loss": total_of_ranks(launch)})
    total = launch.size * (launch.size + 1) / 2
    # Other scalars count the elements that are not finite.
    scalars = {tag: one for tag, one in logger.scalars.items() if launch.rank or "/" not in tag}
    assert scalars == ({} if launch.rank else {"loss": total})
    whole = {name: tensor_of(name, *tensor.shape) for name, tensor in state.items()}
    expected = {name: tensor[torch.isfinite(tensor)] for name, tensor in whole.items()}
    assert set(logger.histograms) == (set() if launch.rank else set(expected))
    for name, values in logger.histograms.items():
        assert torch.equal(values, expected[name]), name
    with contextlib.redirect_stdout(io.StringIO()) as written:
        log(1, None, {"loss": 0.5})
    assert written.getvalue() == ("" if launch.rank else "step 1: loss=0.5\n")


def case_a_failure_to_log_on_rank_0_does_not_block_the_others(launch: Launch) -> None:
    extra = {} if launch.rank else {"note": "text"}
    with refused_on(range(1), ValueError, "'note': a str"):
        log(1, None, {**extra, "loss": total_of_ranks(launch)})
    twice = {} if launch.rank else {"all/loss": 1.0}
    with refused_on(range(1), ValueError, "'all/loss': two values have this name"):
        log(1, None, {**twice, "all": {"loss": total_of_ranks(launch)}})
    with refused_on(range(1), AttributeError, "add_scalar"):
        log(1, [], {"loss": total_of_ranks(launch)})  # type: ignore[arg-type]
    dist.barrier()


def case_a_value_that_no_rank_can_log_is_refused_on_all(launch: Launch) -> None:
    ranks = range(launch.size)
    with refused_on(ranks, ValueError, "'w': a DTensor of torch.complex64"):
        log(1, None, {"w": total_of_ranks(launch).to(torch.complex64)})
    mesh = DeviceMesh("cpu", list(range(1, launch.size)))
    tensor = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
    with refused_on(ranks, ValueError, "'w': a DTensor on .* does not include rank 0"):
        log(1, None, {"w": tensor})


def case_a_tensor_of_some_ranks_is_logged_without_the_others(launch: Launch) -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    logger = Recorded()
    log(1, logger, {"w": distribute_tensor(torch.arange(6), mesh, [Shard(0)])})
    if launch.rank == 0:
        assert logger.histograms["w"].tolist() == [0, 1, 2, 3, 4, 5]
    else:
        assert not logger.histograms


# --- profiles ------------------------------------------------------------------------------------


def operations(path: str) -> set[str]:
    events = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
    return {event.get("name") for event in events}


def case_a_profile_has_the_trace_of_rank_0_and_wrong_calls_are_refused_on_all(
    launch: Launch,
) -> None:
    with refused_on(range(launch.size), RuntimeError, "no profile is running"):
        stop_profile(launch.path())
    start_profile()
    with refused_on(range(launch.size), RuntimeError, "a profile is running"):
        start_profile()
    torch.ones(3).cumsum(0)
    path = stop_profile(launch.path("traces"))
    dist.barrier()
    [trace] = launch.path("traces").iterdir()
    assert path == (None if launch.rank else str(trace))
    assert "aten::cumsum" in operations(str(trace))


def case_a_profile_of_all_ranks_has_a_trace_of_each(launch: Launch) -> None:
    start_profile(all_ranks=True)
    torch.ones(3).cumsum(0)
    path = stop_profile(launch.path("traces"))
    assert path is not None
    assert Path(path).name.startswith(f"rank-{launch.rank}.")
    assert "aten::cumsum" in operations(path)
    dist.barrier()
    assert len(list(launch.path("traces").iterdir())) == launch.size


# --- files ---------------------------------------------------------------------------------------


def case_a_graph_is_saved_by_rank_0_and_a_wrong_suffix_refused_on_all(launch: Launch) -> None:
    save_graph(Graph(), launch.path(f"{launch.rank}.dot"))
    with refused_on(range(launch.size), ValueError, "must end in"):
        save_graph(Graph(), launch.path("graph.png"))
    dist.barrier()
    assert [file.name for file in launch.path().iterdir()] == ["0.dot"]


def case_all_ranks_can_make_one_directory_at_the_same_time(launch: Launch) -> None:
    mkdir(launch.path("a", "b"))
    assert launch.path("a", "b").is_dir()


# --- steps ---------------------------------------------------------------------------------------


def case_a_complete_step_and_another_dtype_on_one_rank_are_refused_on_all(launch: Launch) -> None:
    save_checkpoint(launch.path("run"), 1, {"t": torch.ones(3)})
    with pytest.raises(FileExistsError, match="complete"):
        save_checkpoint(launch.path("run"), 1, {"t": torch.zeros(3)})
    state = {"t": torch.zeros(3, dtype=torch.float32 if launch.rank else torch.int64)}
    with pytest.raises(CheckpointException, match=r"stored torch\.float32, wanted"):
        load_checkpoint_if_it_exists(launch.path("run"), state)
    assert not state["t"].any()


def case_a_root_that_one_rank_cannot_open_is_an_error_on_all_without_a_wait(
    launch: Launch,
) -> None:
    save_checkpoint(launch.path("run"), 1, {"t": torch.ones(3)})
    path, error = launch.path("run"), RuntimeError
    if launch.rank == 1:
        path, error = launch.path("file"), NotADirectoryError
        path.write_text("no root")
    with pytest.raises(error, match=r"rank 1|file"):
        load_checkpoint_if_it_exists(path, {"t": torch.zeros(3)})


def case_no_rank_warns_of_names_of_another_pipeline_stage(launch: Launch) -> None:
    def stage() -> dict[str, torch.Tensor | PerRank]:
        return {f"stage{launch.rank}": torch.ones(3), "own": PerRank(launch.rank)}

    save_checkpoint(launch.path("run"), 1, stage())
    with no_warnings():
        load_checkpoint_if_it_exists(launch.path("run"), stage())


def case_rank_0_warns_of_stored_names_that_no_rank_has(launch: Launch) -> None:
    save_checkpoint(launch.path("run"), 1, {"t": torch.ones(3), "u": torch.ones(3)})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_checkpoint_if_it_exists(launch.path("run"), {"t": torch.zeros(3)})
    text = "step 1 has names that are not in the state and were not loaded: u"
    assert [str(warning.message) for warning in caught] == ([] if launch.rank else [text])


test_on_ranks = on_ranks(globals())
