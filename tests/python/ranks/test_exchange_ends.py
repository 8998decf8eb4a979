"""Rendezvous whose save, store or group ends early."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

import torch_ckpt
from tests.fault_hooks import before
from tests.forked import context
from tests.rank_threads import (
    PATIENCE_SECONDS,
    SHORT,
    causes_of,
    ranks_of,
    save,
    tcp_store,
    together,
)
from tests.ranks import on_forked_ranks
from torch_ckpt.ranks.exchange import Exchange
from torch_ckpt.ranks.group import RankGroup
from torch_ckpt.ranks.store import StoreThread


@pytest.mark.parametrize("by", [torch_ckpt.save, torch_ckpt.async_save])
def test_wrong_options_on_one_rank_fail_the_save_of_the_others_at_once(
    by: Callable[..., Any], tmp_path: Path
) -> None:
    other_is_through = context.Event()

    def work(rank: int) -> Any:
        if rank == 1:
            with pytest.raises(ValueError, match="check_replicas must be one of"):
                by({"n": 1}, tmp_path, check_replicas="all")
            # Long before this rank would be declared dead.
            return other_is_through.wait(PATIENCE_SECONDS / 2)
        try:
            return by({"n": 1}, tmp_path, timeout=PATIENCE_SECONDS).result()
        finally:
            other_is_through.set()

    failed, was_told = on_forked_ranks(2, work)
    assert set(causes_of(failed)) == {1}
    assert "check_replicas" in causes_of(failed)[1]
    assert was_told


def test_an_interrupted_coordinator_does_not_wait_for_the_others_again(
    tmp_path: Path,
) -> None:
    def work(rank: int) -> float:
        if rank == 1:
            return 0.0  # which does not arrive
        main = threading.get_ident()
        later = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT))
        # The interrupt arrives during the wait, and not in the hook.
        with before("wait for ranks", later.start), pytest.raises(KeyboardInterrupt):
            torch_ckpt.save({"n": 1}, tmp_path, timeout=PATIENCE_SECONDS)
        return time.monotonic()

    before_close = time.monotonic()
    ended, _ = on_forked_ranks(2, work)
    assert ended - before_close < PATIENCE_SECONDS / 2


def test_a_store_whose_server_has_ended_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    servers = [tcp_store()]
    ranks = ranks_of(servers[0].clone(), 2)
    together(ranks, save)

    def local() -> None:
        servers.clear()

    for rank, outcome in together(ranks, lambda r: save(r, local if r.rank else str)).items():
        [cause] = causes_of(outcome).values()
        assert (
            f"rank {rank} lost the connection to the process group's store during 'write'" in cause
        )
        assert cause.startswith("ConnectionError")
    capfd.readouterr()  # of the store's own message


def test_an_error_of_the_store_without_a_text_is_named_by_its_type() -> None:
    def lose() -> None:
        raise ConnectionResetError

    with pytest.raises(CheckpointException, match=r"store during 'write' \(ConnectionResetError\)"):
        StoreThread().request("write", 0, PATIENCE_SECONDS, lose)


class StoppedStore(dist.Store):  # type: ignore[misc]
    """TCPStore whose server is stopped, and a store that cannot be cloned."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()
        self.asked = 0

    def set(self, key: str, value: str) -> None:
        pass

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        return self.goes_on.wait(PATIENCE_SECONDS)


@pytest.mark.parametrize(
    ("work", "may_have_committed"),
    [(save, True), (lambda ranks: ranks.run("load", str), False)],
    ids=["save", "load"],
)
def test_a_store_that_does_not_answer_is_an_error_and_gets_no_more_calls(
    work: Callable[[Exchange], Any], may_have_committed: bool
) -> None:
    stopped = StoppedStore()
    [ranks] = [Exchange.open(RankGroup(stopped, 1, 2, "test"), "save", SHORT)]
    [outcome] = together([ranks], work).values()
    before_close = stopped.asked
    ranks.close()
    [again] = together([ranks], work).values()
    stopped.goes_on.set()
    assert causes_of(again) == causes_of(outcome)
    assert "ConnectionError" in causes_of(outcome)[1]
    assert "no answer for 0.5 s" in causes_of(outcome)[1]
    assert stopped.asked == before_close == 1
    assert ("rank 0 may have committed" in str(outcome)) == may_have_committed


# --- one rank group for each process group ------------------------------------------------------


@pytest.mark.usefixtures("default_group")
def test_a_process_group_has_one_rank_group() -> None:
    group = RankGroup.of(None)
    assert group is RankGroup.of(dist.group.WORLD)
    assert group is not RankGroup.of(dist.new_group([0]))
    assert (group.rank, group.size, group.distributed) == (0, 1, True)


def test_a_new_default_group_has_new_keys() -> None:
    store = dist.HashStore()
    prefixes = set()
    for _ in range(2):
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        prefixes.add(RankGroup.of(None).next_prefix("save"))
        dist.destroy_process_group()
    assert len(prefixes) == 2


@pytest.mark.usefixtures("default_group")
def test_a_running_save_keeps_the_store_of_a_destroyed_group() -> None:
    ranks = Exchange.open(RankGroup.of(None), "save", 300.0)
    store = weakref.ref(RankGroup.of(None))
    dist.destroy_process_group()
    gc.collect()
    held = store()
    assert held is not None
    held.connection().set("key", "value")
    assert save(ranks) == ["part"]
    ranks.close()


@pytest.mark.usefixtures("default_group")
def test_a_rank_group_is_deleted_with_its_process_group() -> None:
    # Otherwise the next group on the port would find the keys of this group in the server.
    group = weakref.ref(RankGroup.of(None))
    assert group() is not None
    dist.destroy_process_group()
    gc.collect()
    assert group() is None
