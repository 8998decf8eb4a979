"""Megatron-core's released code with torch_ckpt installed, if Megatron-core is available."""

from __future__ import annotations

import io
import random
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp

from benchmarks import no_cuda
from tests.distributed.cases import Launch, StateDict
from tests.distributed.launcher import on_ranks
from tests.distributed.peers import (
    assert_is_ours,
    assert_loads,
    children,
    directory,
    emptied,
    installed,
    loaded,
    megatron_state,
    plain,
    request_for,
    request_of,
    run_in,
    save_strategy,
    save_through,
    sharded,
    strategies,
    their_queue,
    why_skipped,
)
from tests.support import assert_equal, data_files, random_tensor
from torch_ckpt.megatron import install, uninstall

pytestmark = pytest.mark.full

IMPORTED = ["tests.distributed.peers_imported"]

# A process that a rank spawns imports this file again under this name.
if __name__ == "__mp_main__":
    no_cuda.pretend()

# --- Megatron-core, with all of ours --------------------------------------------------------------


def case_a_megatron_save_through_ours_is_loaded_by_ours_by_theirs_and_by_torch(
    launch: Launch,
) -> None:
    path = directory(launch)
    before = children()
    with installed():
        queue = their_queue()
        assert queue.schedule_async_request(request_for(launch, path, seed=2)) == 0
        assert not (path / ".metadata").exists()
        assert queue.maybe_finalize_async_calls(blocking=True) == [0]
        queue.close()
        assert_loads(launch, path, seed=2)
    # Neither a worker nor a manager of queues.
    assert children() == before
    assert_is_ours(launch, path)
    assert (path / "metadata.json").exists()
    assert_loads(launch, path, seed=2)
    assert_rows_load_by_torch(launch, path, seed=2)


def assert_rows_load_by_torch(launch: Launch, path: Path, seed: int) -> None:
    """Checks full tensors of all ranks, and this rank's object."""
    key = f"model.extra/shard_{launch.rank}_{launch.size}"
    state: StateDict = {"model.rows": torch.zeros(6 * launch.size, 5), key: None}
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    expected = megatron_state(launch, seed)
    rows = state["model.rows"][6 * launch.rank : 6 * (launch.rank + 1)]
    assert_equal(rows, expected["rows"].data)
    assert_equal(state[key], [expected["object"].data])


def case_megatron_saves_synchronously_through_ours(launch: Launch) -> None:
    """Megatron's synchronous save executes the request in place."""
    from megatron.core import dist_checkpointing

    path = directory(launch)
    with installed():
        dist_checkpointing.save(megatron_state(launch, 3), str(path))
        assert_is_ours(launch, path)
        assert_loads(launch, path, seed=3)


def case_four_megatron_saves_of_one_structure_are_planned_together_twice(launch: Launch) -> None:
    """The second save is compared with the first. From then on nothing is exchanged."""
    planner = strategies("torch").MCoreSavePlanner
    planned = []

    def create_global_plan(self: Any, plans: Any) -> Any:
        planned.append(len(plans))
        return dcp.DefaultSavePlanner.create_global_plan(self, plans)

    with installed(), mock.patch.object(planner, "create_global_plan", create_global_plan):
        strategy = save_strategy(cached=True)
        queue = their_queue()
        reused = []
        for seed in range(4):
            path = directory(launch, str(seed))
            run_in(queue, request_for(launch, path, seed, strategy))
            reused.append(strategy.validated_cache_reuse)
            assert_is_ours(launch, path)
            assert_loads(launch, path, seed)
        queue.close()
    assert planned == ([launch.size] * 2 if launch.rank == 0 else [])
    assert reused == [False, True, True, True]


def case_a_structure_that_changes_unnoticed_by_megatrons_cache_fails_the_save(
    launch: Launch,
) -> None:
    with installed():
        strategy = save_strategy(cached=True)
        queue = their_queue()
        for number in range(2):
            path = directory(launch, str(number))
            run_in(queue, request_for(launch, path, 1, strategy))
        path = directory(launch, "changed")
        state = {"new": sharded("new", torch.zeros(3, 2), (0, launch.rank, launch.size))}
        with pytest.raises(dcp.CheckpointException) as error:
            run_in(queue, strategy.async_save(state, path))
        queue.close()
    if launch.rank == 0:
        failures = error.value.failures
        assert list(failures) == list(range(launch.size))
        text = "the state dict has changed since the cached plan was made"
        assert text in str(failures[0][0])
    assert not (path / ".metadata").exists()


def case_a_resumed_run_reuses_the_loaded_metadata(launch: Launch) -> None:
    """Megatron's training does this after a restart: the plans in the metadata fit its state."""
    before, after = directory(launch, "before"), directory(launch, "after")
    with installed():
        queue = their_queue()
        run_in(queue, request_for(launch, before, 5, save_strategy(cached=True)))
        loading = strategies("torch").TorchDistLoadShardedStrategy()
        loaded(emptied(megatron_state(launch, 5)), before, loading)
        saving = save_strategy(cached=True)
        saving.cached_global_metadata = loading.cached_global_metadata
        run_in(queue, request_for(launch, after, 6, saving))
        queue.close()
        assert saving.validated_loaded_metadata_reuse
        assert_loads(launch, after, seed=6)
    assert_is_ours(launch, after)


def case_megatron_distributes_replicas_over_its_ranks_and_loads_them(launch: Launch) -> None:
    """Fully parallel strategies: ranks write and read for each other."""

    def state() -> StateDict:
        return {
            f"t{i}": sharded(
                f"t{i}", random_tensor((50, 3), torch.float32, seed=i), replica_id=launch.rank
            )
            for i in range(8)
        }

    path = directory(launch)
    parallel = strategies("fully_parallel")
    with installed():
        saving = parallel.FullyParallelSaveStrategyWrapper(save_strategy(threads=1))
        save_through(their_queue(), request_of(state(), path, saving))
        assert [file.name for file in data_files(path)] == [
            f"__{rank}_0.distcp" for rank in range(launch.size)
        ]
        loading = parallel.FullyParallelLoadStrategyWrapper(
            strategies("torch").TorchDistLoadShardedStrategy(), exchange_algo="gather_object"
        )
        found = loaded(emptied(state()), path, loading)
    assert_equal(found, plain(state()))


def case_objects_of_megatrons_training_load_without_running_a_pickle(launch: Launch) -> None:
    """Objects that Megatron stores beside tensors, and its types that it declares safe."""
    from megatron.core.dist_checkpointing import ShardedObject
    from megatron.core.rerun_state_machine import RerunMode

    def state(*values: object) -> StateDict:
        names = ("rng_state", "extra_state", "rerun_state_machine_state")
        return {
            name: ShardedObject(name, value, (launch.size,), (launch.rank,))
            for name, value in zip(names, values, strict=True)
        }

    rng = {
        "random_rng_state": random.Random(launch.rank).getstate(),
        "np_rng_state": numpy.random.RandomState(launch.rank).get_state(),
        "torch_rng_state": torch.Generator().manual_seed(launch.rank).get_state(),
    }
    path = directory(launch)
    with installed():
        saved = state([rng], io.BytesIO(b"of the layer"), {"mode": RerunMode.VALIDATE_RESULTS})
        save_through(their_queue(), request_of(saved, path))
        found = loaded(state(None, None, None), path)
    ((kind, keys, *rest),) = (of.pop("np_rng_state") for of in found["rng_state"])
    expected_kind, expected_keys, *expected_rest = rng.pop("np_rng_state")
    assert (kind, rest) == (expected_kind, expected_rest)
    assert numpy.array_equal(keys, expected_keys)
    assert_equal(found["rng_state"], [rng])
    assert found["extra_state"].getvalue() == b"of the layer"
    assert found["rerun_state_machine_state"] == {"mode": RerunMode.VALIDATE_RESULTS}


def case_megatron_loads_rows_as_columns(launch: Launch) -> None:
    path = directory(launch)
    whole = random_tensor((12, 8), torch.float32, seed=1)
    rows, columns = (whole.chunk(launch.size, dim)[launch.rank].contiguous() for dim in (0, 1))
    place = (launch.rank, launch.size)
    with installed():
        save_through(their_queue(), request_of({"t": sharded("t", rows, (0, *place))}, path))
        found = loaded({"t": sharded("t", torch.zeros_like(columns), (1, *place))}, path)
    assert_equal(found["t"], columns)


def case_megatron_loads_another_shape_if_allowed(launch: Launch) -> None:
    """Megatron pads its vocabulary differently for other numbers of ranks."""
    path = directory(launch)

    def state(rows: int, value: float, **options: Any) -> StateDict:
        data = torch.full((rows, 3), value)
        return {"t": sharded("t", data, replica_id=launch.rank, **options)}

    def found(rows: int) -> torch.Tensor:
        tensor: torch.Tensor = loaded(state(rows, 7.0, allow_shape_mismatch=True), path)["t"]
        return tensor

    with installed():
        save_through(their_queue(), request_of(state(6, 1.0), path))
        larger, smaller = found(8), found(4)
    assert_equal(smaller, torch.full((4, 3), 1.0))
    assert_equal(larger[:6], torch.full((6, 3), 1.0))
    # Megatron's own strategy fills what is not stored, with either reader.
    assert_equal(larger, found(8))


def case_install_changes_only_what_it_reports_and_uninstall_restores_it(launch: Launch) -> None:
    for module in ("base", "torch"):
        strategies(module)

    def values() -> dict[str, object]:
        return {
            f"{title}.{name}": value
            for title, module in list(sys.modules.items())
            if title.partition(".")[0] in ("megatron", "nvidia_resiliency_ext")
            for name, value in vars(module).items()
        }

    # install() imports the modules that it changes.
    with installed():
        pass
    before = values()
    reported = {line.partition(" -> ")[0] for line in install()}
    after = values()
    assert {name for name, value in after.items() if value is not before[name]} == reported
    package = "megatron.core.dist_checkpointing"
    assert f"{package}.strategies.torch.FileSystemWriterAsync" in reported
    assert f"{package}.strategies.filesystem_async._get_write_results_queue" in reported
    assert f"{package}.strategies.base.async_calls" in reported
    assert f"{package}.serialization.AsyncRequest" in reported
    uninstall()
    assert all(value is before[name] for name, value in values().items())


test_on_ranks = on_ranks(globals(), (1, 2, 4), why_skipped)


@pytest.mark.parametrize("name", no_cuda.REPLACEMENTS)
def test_other_tests_have_the_unchanged_torch_cuda(name: str) -> None:
    assert getattr(torch.cuda, name) is not no_cuda.REPLACEMENTS[name]
