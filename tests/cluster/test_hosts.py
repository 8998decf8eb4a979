"""Saves and loads on two hosts over shared file systems, and over local ones."""

from __future__ import annotations

import pytest

from tests.cluster import work
from tests.cluster.hosts import Cluster, results_of

# A host begins with copies of all mounts, so tests that mount images must not run meanwhile.
pytestmark = [pytest.mark.full, pytest.mark.alone]

SHARED = ["juicefs", "sshfs"]


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


@pytest.mark.parametrize("hosts", SHARED, indirect=True)
def test_only_one_of_many_jobs_that_start_at_once_gets_the_root(hosts: Cluster) -> None:
    errors = hosts.run(work.start_at_once, str(hosts.path), ranks_per_host=4)
    assert errors.count("") == 1
    for error in filter(None, errors):
        assert "another run is writing to this root" in error


@pytest.mark.parametrize("hosts", SHARED, indirect=True)
def test_jobs_that_save_to_one_directory_lose_and_mix_nothing(hosts: Cluster) -> None:
    found = hosts.run(work.save_to_one_directory, f"{hosts.path}/checkpoint", 8, ranks_per_host=2)
    assert found == [[], [], [], []]


@pytest.mark.parametrize("hosts", SHARED, indirect=True)
def test_a_manager_ends_soon_after_a_host_has_died(hosts: Cluster) -> None:
    timeout = 5.0
    survivor, dead = hosts.start(work.save_while_a_host_dies, str(hosts.path), timeout)
    for rank in range(2):
        hosts.wait_for(f"rank {rank} has saved")
    hosts.hosts[1].kill()
    hosts.signal("killed")
    [[seconds, errors]] = results_of([survivor])
    assert dead.returncode != 0
    assert any("rank 1" in error for error in errors), errors
    assert seconds < 3 * timeout


@pytest.mark.parametrize(
    ("hosts", "locks"), [("juicefs", "holds"), ("sshfs", "fails")], indirect=["hosts"]
)
def test_the_doctor_shows_how_two_hosts_see_a_directory(hosts: Cluster, locks: str) -> None:
    states, nothing = hosts.run(work.diagnose, str(hosts.path))
    assert nothing is None
    assert states.pop("locks exclude other ranks") == locks
    assert set(states.values()) == {"holds"}
    assert len(states) == 5


@pytest.mark.parametrize("hosts", ["local"], indirect=True)
def test_disks_that_the_hosts_do_not_share_are_named_by_every_api(hosts: Cluster) -> None:
    for errors, left in hosts.run(work.save_on_own_disks, str(hosts.path)):
        assert [path for path in left if not path.endswith("/.lease")] == []
        assert len(errors) == 4
        for error in errors:
            assert "the hosts have different directories at this path" in error
            assert "host0" in error
            assert "host1" in error
