"""torch_ckpt.multihost on ranks: barriers by name, and stops at one step."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.cases import Launch
from tests.distributed.launcher import on, on_ranks, takes_several
from tests.distributed.trees import PATIENCE, disagreement, others
from torch_ckpt import multihost

pytestmark = pytest.mark.full

# Seconds after which an absent rank is declared dead.
SHORT = 2.0


# --- names ----------------------------------------------------------------------------------------


def case_no_rank_passes_before_all_have_arrived(launch: Launch) -> None:
    store = dist.PrefixStore("order", dist.distributed_c10d._get_default_store())
    for turn in range(10):
        store.add(f"came {turn}", 1)
        # Names may be repeated.
        multihost.sync_global_devices(f"turn {turn % 3}", timeout=PATIENCE)
        assert store.add(f"came {turn}", 0) == launch.size


@takes_several
def case_different_names_or_functions_raise_on_every_rank_instead_of_a_hang(launch: Launch) -> None:
    last = launch.rank == launch.size - 1
    name = "evaluate" if last else "train"
    text = disagreement(launch, lambda: multihost.sync_global_devices(name, timeout=PATIENCE))
    assert f"{others(launch)}: sync_global_devices('train')" in text
    assert f"rank {launch.size - 1}: sync_global_devices('evaluate')" in text

    def work() -> Any:
        if launch.rank == 0:
            return multihost.sync_global_devices("a")
        return multihost.broadcast_one_to_all({"x": torch.zeros(3)})

    text = disagreement(launch, work)
    assert "rank 0: sync_global_devices('a')" in text
    assert "broadcast_one_to_all()" in text
    # The ranks are still in step.
    multihost.sync_global_devices("after")


@takes_several
@on(2, 4)
def case_an_absent_rank_is_named_on_the_others(launch: Launch) -> None:
    store = dist.PrefixStore("absent", dist.distributed_c10d._get_default_store())
    absent = launch.size - 1
    # Connects to the store, which may take seconds. The next calls have short timeouts.
    multihost.sync_global_devices("before", timeout=PATIENCE)
    if launch.rank == absent:
        store.wait([f"gave up {rank}" for rank in range(absent)])
    with pytest.raises(TimeoutError, match=rf"'late'\): rank {absent} did not arrive within 2 s"):
        multihost.sync_global_devices("late", timeout=SHORT)
    store.set(f"gave up {launch.rank}", "")
    multihost.sync_global_devices("after", timeout=PATIENCE)


@takes_several
@on(4)
def case_a_group_synchronizes_without_the_other_ranks(launch: Launch) -> None:
    half = launch.size // 2
    groups = [dist.new_group(range(start, start + half)) for start in (0, half)]
    mine, number = groups[launch.rank // half], launch.rank // half
    multihost.sync_global_devices(f"half {number}", process_group=mine)
    last = launch.rank % half == half - 1
    tree = {"t": torch.tensor(launch.rank), "o": launch.rank}
    found = multihost.broadcast_one_to_all(tree, last, process_group=mine)
    source = number * half + half - 1
    assert (found["t"].item(), found["o"]) == (source, source)
    members = list(range(number * half, number * half + half))
    found = multihost.process_allgather(tree, process_group=mine)
    assert (found["t"].tolist(), found["o"]) == (members, members)
    multihost.assert_equal(number, process_group=mine)
    with pytest.raises(ValueError, match=f"rank {launch.rank} is not in the process group"):
        multihost.sync_global_devices("x", process_group=groups[1 - number])


# --- preemption -----------------------------------------------------------------------------------


def steps_until_preempted(
    launch: Launch, preempt: Callable[[int], None], first: int = 0
) -> list[int]:
    """Returns the step at which each rank must stop. A collective in each step keeps ranks in
    step."""
    for step in range(first, first + 1_000_000):
        if multihost.reached_preemption_sync_point(step):
            break
        preempt(step)
        dist.all_reduce(torch.ones(1))
    else:
        raise AssertionError("no rank was preempted")
    stopped: list[Any] = [None] * launch.size
    dist.all_gather_object(stopped, step)
    return stopped


def case_a_signal_to_one_rank_stops_all_at_the_same_step(launch: Launch) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    victim = launch.size - 1

    def preempt(step: int) -> None:
        if step == 3 and launch.rank == victim:
            os.kill(os.getpid(), signal.SIGTERM)

    with multihost.watch_for_preemption(poll_seconds=0.05, timeout=PATIENCE) as watch:
        stopped = steps_until_preempted(launch, preempt)
        assert stopped == stopped[:1] * launch.size
        assert stopped[0] > 3
        assert watch.reason == f"SIGTERM on rank {victim}"
        assert multihost.reached_preemption_sync_point(stopped[0])
        assert not multihost.reached_preemption_sync_point(stopped[0] + 1)
        # Training that continues can be preempted again, by another rank.
        again = steps_until_preempted(
            launch,
            lambda step: (
                os.kill(os.getpid(), signal.SIGTERM)
                if launch.rank == 0 and step == stopped[0] + 5
                else None
            ),
            first=stopped[0] + 2,
        )
        assert again == again[:1] * launch.size
        assert again[0] > stopped[0] + 5
        assert watch.reason == "SIGTERM on rank 0"
    assert signal.getsignal(signal.SIGTERM) is handler


@takes_several
def case_a_rank_that_does_not_watch_is_named_after_a_notice(launch: Launch) -> None:
    absent = launch.size - 1
    store = dist.PrefixStore("unwatched", dist.distributed_c10d._get_default_store())
    # The watching ranks count one watch more, so a watch of another group would not match.
    group = dist.new_group()
    multihost.sync_global_devices("before", process_group=group, timeout=PATIENCE)
    if launch.rank == absent:
        store.wait([f"gave up {rank}" for rank in range(absent)])
        return
    with multihost.watch_for_preemption(
        (signal.SIGUSR1,), process_group=group, poll_seconds=0.05, timeout=SHORT
    ) as watch:
        if launch.rank == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(TimeoutError, match=f"rank {absent} did not arrive within 2 s"):
            any(map(watch.reached, range(10_000_000)))
    store.set(f"gave up {launch.rank}", "")


test_on_ranks = on_ranks(globals(), (1, 2, 4))
