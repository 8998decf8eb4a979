"""Ranks that fall silent or get stuck in saves through the Megatron interface."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.distributed.megatron_deaths import DEATHS, SIZE, Death, play, run_rank, state_of
from tests.distributed.silent_ranks import TIMEOUT, Found, given_up_after, play_in_groups
from tests.metadata import read_metadata
from tests.ranks import ranks
from tests.support import assert_equal, emptied, stock_load
from torch_ckpt.checkpoint.lease import remove_leftovers

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deaths")


@pytest.fixture(scope="module")
def played(workdir: Path) -> Iterator[dict[Death, Future[Found]]]:
    """Plays all cases, each in its own directory."""
    with play_in_groups(DEATHS, lambda death: play(workdir / str(death), death)) as found:
        yield found


@pytest.mark.parametrize("death", [d for d in DEATHS if d.how != "stuck"], ids=str)
def test_a_silent_rank_is_named_on_all_others_and_nothing_is_published(
    played: dict[Death, Future[Found]], death: Death
) -> None:
    found = played[death].result()
    reason = f"rank {death.victim} {given_up_after(death.victim)} during '{death.step}'"
    for rank in set(range(SIZE)) - {death.victim}:
        ranks, text, _seconds = found.outcomes[rank]
        assert ranks == [death.victim]
        assert reason in text
    assert not found.published


@pytest.mark.parametrize("death", [d for d in DEATHS if d.how == "stopped"], ids=str)
def test_a_rank_that_continues_fails(played: dict[Death, Future[Found]], death: Death) -> None:
    ranks, text, _seconds = played[death].result().outcomes[death.victim]
    assert ranks == [death.victim], text


@pytest.mark.parametrize("death", [d for d in DEATHS if d.how == "stuck"], ids=str)
def test_a_stuck_write_is_named_on_all_ranks_with_rank_file_and_phase(
    played: dict[Death, Future[Found]], workdir: Path, death: Death
) -> None:
    found = played[death].result()
    for rank in range(SIZE):
        ranks, text, _seconds = found.outcomes[rank]
        assert ranks == [death.victim]
        assert f"rank {death.victim}: call 0 made no progress for {TIMEOUT:g} s" in text
        assert f"__{death.victim}_0.distcp in {workdir / str(death)}: writing" in text
    assert not found.published


@pytest.mark.parametrize("death", DEATHS, ids=str)
def test_the_ranks_save_into_the_same_directory_afterwards(
    played: dict[Death, Future[Found]], workdir: Path, death: Death
) -> None:
    played[death].result()
    path = workdir / str(death)
    if death.how == "killed":
        with ranks(SIZE, run_rank, path, 2) as group:
            assert [group.answer(rank) for rank in range(SIZE)] == [None] * SIZE
    for rank in range(SIZE):
        expected = state_of(rank, 2)
        loaded = emptied(expected)
        stock_load(loaded, path)
        assert_equal(loaded, expected)
    if death.how == "stopped":
        # The failed save may have kept the directory open until the garbage collection.
        remove_leftovers(path)
    named = {info.relative_path for info in read_metadata(path).storage_data.values()}
    assert set(os.listdir(path)) == named | {".metadata"}
