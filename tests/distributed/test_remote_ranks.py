"""Steps beneath URLs, saved and loaded by two ranks: each case of remote_cases.py, and a rank that
falls silent in a save."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.launcher import Launch, Processes, launch_tests
from tests.distributed.remote_cases import CASES
from tests.distributed.remote_deaths import TIMEOUT
from tests.remote_stores import s3_server

LAUNCHES = {"2 ranks": Launch(2, list(CASES))}

torchrun, test_on_ranks, test_all_ranks_of_a_launch_end_well = launch_tests(
    "tests.distributed.remote_cases", LAUNCHES
)


@pytest.fixture(scope="module", autouse=True)
def object_store() -> Iterator[None]:
    with s3_server() as settings, pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            # As fsspec reads them, when a rank imports it.
            patch.setitem(os.environ, f"FSSPEC_S3_{name.upper()}", value)
        yield


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deaths")


@pytest.fixture(scope="module")
def deaths(workdir: Path) -> Iterator[Processes]:
    """Two ranks of which rank 1 dies in the last case."""
    ranks = Processes("tests.distributed.remote_deaths", 2, workdir / "results", workdir)
    yield ranks
    ranks.kill()


@pytest.mark.parametrize("case", ["stopped", "killed"])
def test_a_rank_that_falls_silent_in_its_upload_is_named(deaths: Processes, case: str) -> None:
    found = deaths.found(case, dead=1 if case == "killed" else None)
    assert found[0]["ranks"] == [1]
    assert f"rank 1 gave no sign of life for {TIMEOUT:g} s in 'write'" in found[0]["text"]


@pytest.mark.parametrize("case", ["stopped", "killed"])
def test_of_a_rank_that_falls_silent_in_its_upload_no_file_is_left(
    deaths: Processes, case: str
) -> None:
    assert deaths.found(case, dead=1 if case == "killed" else None)[0]["files"] == []


def test_a_rank_that_goes_on_after_it_was_given_up_leaves_no_file(
    deaths: Processes, workdir: Path
) -> None:
    assert deaths.found("stopped")[1]["ranks"] == [1]
    assert [path.name for path in (workdir / "run").glob("0000000002/*")] == []
