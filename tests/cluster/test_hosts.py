"""Saves and loads on two hosts over shared file systems, and over local ones."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cluster import work
from tests.cluster.hosts import Cluster, results_of
from tests.sweeps import TORTURE

# A host begins with copies of all mounts, so tests that mount images must not run meanwhile.
pytestmark = [pytest.mark.full, pytest.mark.alone]

SHARED = ["juicefs", "sshfs", "moosefs"]

OVERWRITES = 100 if TORTURE else 10


@pytest.mark.parametrize("hosts", ["local"], indirect=True)
def test_hosts_differ_in_name_and_boot(hosts: Cluster) -> None:
    first, second = hosts.run(work.who_am_i)
    assert (first[0], second[0]) == ("host0", "host1")
    assert first[1] != second[1]


@pytest.mark.parametrize("hosts", SHARED, indirect=True)
def test_every_api_saves_and_loads_on_two_hosts(hosts: Cluster) -> None:
    hosts.run(work.save_and_load, str(hosts.path))


@pytest.mark.parametrize("hosts", [("juicefs", 3)], indirect=True)
def test_every_api_saves_and_loads_on_three_hosts_of_two_ranks(hosts: Cluster) -> None:
    hosts.run(work.save_and_load, str(hosts.path), ranks_per_host=2)


@pytest.mark.parametrize("hosts", ["juicefs"], indirect=True)
def test_every_api_saves_and_loads_in_ranks_that_torchrun_starts(hosts: Cluster) -> None:
    hosts.run_by_torchrun(work.save_and_load, str(hosts.path), ranks_per_host=2)


@pytest.mark.parametrize("hosts", SHARED, indirect=True)
def test_a_manager_of_two_hosts_saves_deletes_and_restores(hosts: Cluster) -> None:
    assert hosts.run(work.run_manager, str(hosts.path)) == [[3, 4], [3, 4]]


@pytest.mark.parametrize("hosts", SHARED, indirect=True)
def test_a_step_that_two_hosts_have_replaced_has_the_new_values(hosts: Cluster) -> None:
    assert hosts.run(work.replace_step, str(hosts.path)) == [1, 1]


@pytest.mark.parametrize("hosts", SHARED, indirect=True)
def test_a_model_that_two_hosts_have_replaced_leaves_nothing(hosts: Cluster) -> None:
    assert hosts.run(work.replace_model, f"{hosts.path}/models") == [["link", "model"], []]


@pytest.mark.parametrize("hosts", SHARED, indirect=True)
def test_versions_of_two_hosts_are_published_and_deleted(hosts: Cluster) -> None:
    assert hosts.run(work.publish_and_load, str(hosts.path)) == [[2, 3], [2, 3]]


@pytest.mark.parametrize("hosts", SHARED, indirect=True)
def test_a_load_after_an_overwriting_save_has_the_new_values(hosts: Cluster) -> None:
    assert hosts.run(work.overwrite_and_load, f"{hosts.path}/checkpoint", OVERWRITES) == [[], []]


@pytest.mark.parametrize("hosts", SHARED, indirect=True)
def test_steps_on_the_disks_of_two_hosts_survive_the_loss_of_a_host(
    hosts: Cluster, tmp_path: Path
) -> None:
    disks = tmp_path / "disks"
    assert hosts.run(work.save_to_tier, str(hosts.path), str(disks)) == [[1, 2, 3], [1, 2, 3]]
    assert {path.name for path in disks.glob("*/*/0*")} == {"0000000002", "0000000003"}
    assert hosts.run(work.restore_from_tier, str(hosts.path), str(disks)) == [3, 3]
    shutil.rmtree(disks / "host1")
    assert hosts.run(work.restore_from_tier, str(hosts.path), str(disks)) == [3, 3]


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


@pytest.mark.parametrize("hosts", SHARED, indirect=True)
@pytest.mark.parametrize(("rank", "operation"), work.PHASES)
def test_a_host_that_dies_with_its_client_loses_no_step(
    hosts: Cluster, rank: int, operation: str
) -> None:
    hosts.start(work.stop_in_a_save, str(hosts.path), rank, operation)
    hosts.wait_for("stopped")
    hosts.kill()
    hosts.hosts[rank].restart()
    assert hosts.run(work.restore, str(hosts.path)) in ([1, 1], [2, 2])


@pytest.mark.parametrize("hosts", SHARED, indirect=True)
def test_a_save_continues_when_the_client_of_a_host_wakes(hosts: Cluster) -> None:
    client = hosts.hosts[1].client
    assert client is not None
    started = hosts.start(work.save_while_a_client_sleeps, str(hosts.path))
    for rank in range(2):
        hosts.wait_for(f"rank {rank} has saved")
    client.signal(signal.SIGSTOP)
    hosts.signal("frozen")
    for rank in range(2):
        hosts.wait_for(f"rank {rank} saves")
    # The client does not answer, so rank 1 cannot save.
    probe = subprocess.Popen(["touch", str(client.mount / "probe")])
    with pytest.raises(subprocess.TimeoutExpired):
        probe.wait(1.0)
    client.signal(signal.SIGCONT)
    probe.wait()
    assert results_of(started) == [2, 2]


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
