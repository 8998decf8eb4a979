"""Saves and loads on two hosts over shared file systems, and over local ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import work
from tests.cluster.hosts import Cluster, cluster, lacking

# A host begins with copies of all mounts, so tests that mount images must not run meanwhile.
pytestmark = [pytest.mark.full, pytest.mark.alone]

SHARED = ["juicefs", "sshfs"]


@pytest.fixture
def hosts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    """Two hosts; the parameter is the kind of their file system."""
    if missing := lacking(request.param):
        pytest.skip(f"this machine lacks {missing}")
    with cluster(request.param, tmp_path) as started:
        yield started


@pytest.mark.parametrize("hosts", ["local"], indirect=True)
def test_hosts_differ_in_name_and_boot(hosts: Cluster) -> None:
    first, second = hosts.run(work.who_am_i)
    assert (first[0], second[0]) == ("host0", "host1")
    assert first[1] != second[1]


@pytest.mark.parametrize("hosts", SHARED, indirect=True)
def test_every_api_saves_and_loads_on_two_hosts(hosts: Cluster) -> None:
    hosts.run(work.save_and_load, str(hosts.path))


@pytest.mark.parametrize("hosts", SHARED, indirect=True)
def test_a_manager_of_two_hosts_saves_deletes_and_restores(hosts: Cluster) -> None:
    assert hosts.run(work.run_manager, str(hosts.path)) == [[3, 4], [3, 4]]


@pytest.mark.parametrize("hosts", SHARED, indirect=True)
def test_a_load_after_an_overwriting_save_has_the_new_values(hosts: Cluster) -> None:
    assert hosts.run(work.overwrite_and_load, f"{hosts.path}/checkpoint", 10) == [[], []]


@pytest.mark.parametrize("hosts", ["local"], indirect=True)
def test_disks_that_the_hosts_do_not_share_are_named_by_every_api(hosts: Cluster) -> None:
    for errors in hosts.run(work.save_on_own_disks, str(hosts.path)):
        assert len(errors) == 4
        for error in errors:
            assert "the hosts have different directories at this path" in error
            assert "host0" in error
            assert "host1" in error
