"""Versions that one process publishes."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_ckpt
from tests.fault_hooks import failing
from tests.support import StateDict, assert_equal, cause_of, random_tensor
from torch_ckpt import Retention
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.publication.publish import Version, async_publish
from torch_ckpt.steps import open_steps


def model(seed: int = 1) -> StateDict:
    return {f"layers.{i}": random_tensor((500,), torch.float32, seed + i) for i in range(4)}


def publish(state: StateDict, root: Path, **options: Any) -> Version:
    return torch_ckpt.publish(state, root, no_dist=True, **options)


def refusal(state: StateDict, root: Path, **options: Any) -> BaseException:
    with pytest.raises(dcp.CheckpointException) as caught:
        publish(state, root, **options)
    return cause_of(caught.value)


def numbers(root: Path) -> list[int]:
    return [info.step for info in open_steps(root).entries(leftovers=False)]


def loaded(path: Path) -> StateDict:
    state = {name: torch.zeros_like(value) for name, value in model().items()}
    torch_ckpt.load(state, path, no_dist=True)
    return state


def test_versions_are_numbered_and_latest_leads_to_the_newest(tmp_path: Path) -> None:
    for number in range(3):
        version = publish(model(number), tmp_path)
        assert version == (number, str(tmp_path / f"{number:010d}"))
        assert os.readlink(tmp_path / "latest") == f"{number:010d}"
        assert_equal(loaded(tmp_path), model(number))
        assert_equal(loaded(tmp_path / "latest"), model(number))
    assert numbers(tmp_path) == [0, 1, 2]
    assert sorted(os.listdir(tmp_path)) == [f"{n:010d}" for n in range(3)] + ["latest"]


def test_a_version_has_the_given_number(tmp_path: Path) -> None:
    assert publish(model(), tmp_path, version=100).number == 100
    assert publish(model(), tmp_path).number == 101


@pytest.mark.parametrize("version", [99, 100])
def test_a_version_that_is_not_newer_is_refused(tmp_path: Path, version: int) -> None:
    publish(model(), tmp_path, version=100)
    error = refusal(model(2), tmp_path, version=version)
    assert isinstance(error, FileExistsError)
    assert "version 100 is the newest" in str(error)
    assert_equal(loaded(tmp_path), model())


def test_a_version_is_verified_listed_and_described_like_a_step(tmp_path: Path) -> None:
    version = publish(model(), tmp_path, version=7)
    assert torch_ckpt.verify(version.path).ok
    (info,) = open_steps(tmp_path).entries()
    assert info.complete
    assert info.step == 7
    assert info.bytes > 8000
    assert info.saved_at is not None


def test_a_snapshot_is_published_in_the_background(tmp_path: Path) -> None:
    state = model()
    handle = async_publish(state, tmp_path, no_dist=True)
    for value in state.values():
        value.zero_()
    handle.result()
    assert_equal(loaded(tmp_path), model())
    handle = async_publish(model(2), tmp_path, version=5, delta=True, no_dist=True)
    handle.result()
    assert numbers(tmp_path) == [0, 5]
    assert (tmp_path / "0000000005" / "torch_ckpt.delta").exists()


# --- a base --------------------------------------------------------------------------------------


def inodes(version: Version) -> dict[str, int]:
    return {file.name: file.stat().st_ino for file in Path(version.path).iterdir()}


def test_files_that_have_not_changed_are_shared_with_the_base(tmp_path: Path) -> None:
    state = model()
    first = publish(state, tmp_path, format=torch_ckpt.Safetensors(max_shard_size=4000))
    state["layers.3"] = state["layers.3"] + 1
    second = publish(
        state, tmp_path, format=torch_ckpt.Safetensors(max_shard_size=4000), base="latest"
    )
    before, after = inodes(first), inodes(second)
    files = sorted(name for name in after if name.endswith(".safetensors"))
    assert len(files) == 2
    assert after[files[0]] == before[files[0]]
    assert after[files[1]] != before[files[1]]
    assert torch_ckpt.verify(second.path).ok
    torch_ckpt.publish(state, tmp_path, keep=1, no_dist=True)
    assert numbers(tmp_path) == [2]


def test_a_shared_file_stays_when_the_base_is_deleted(tmp_path: Path) -> None:
    publish(model(), tmp_path)
    publish(model(), tmp_path, base="latest", keep=1)
    assert numbers(tmp_path) == [1]
    assert_equal(loaded(tmp_path), model())


def test_a_file_whose_base_is_damaged_is_not_shared(tmp_path: Path) -> None:
    first = publish(model(), tmp_path)
    file = Path(first.path) / "model.safetensors"
    contents = bytearray(file.read_bytes())
    contents[-1] ^= 1
    file.write_bytes(contents)
    second = publish(model(), tmp_path, base=first.number)
    assert inodes(second)["model.safetensors"] != inodes(first)["model.safetensors"]
    assert torch_ckpt.verify(second.path).ok


def test_a_file_that_cannot_be_shared_is_stored_again(tmp_path: Path) -> None:
    first = publish(model(), tmp_path)
    with failing("link", errno.EXDEV), pytest.warns(match="stored again instead of sharing"):
        second = publish(model(), tmp_path, base="latest")
    assert inodes(second)["model.safetensors"] != inodes(first)["model.safetensors"]
    assert torch_ckpt.verify(second.path).ok


def test_the_base_can_be_an_older_version(tmp_path: Path) -> None:
    for seed in range(3):
        publish(model(seed), tmp_path)
    version = publish(model(9), tmp_path, base=1, delta=True)
    state = model(1)
    torch_ckpt.apply_delta(version.path, state)
    assert_equal(state, model(9))


def test_the_first_version_has_no_delta(tmp_path: Path) -> None:
    version = publish(model(), tmp_path, delta=True)
    assert "torch_ckpt.delta" not in inodes(version)


def test_a_missing_base_is_refused(tmp_path: Path) -> None:
    publish(model(), tmp_path)
    error = refusal(model(), tmp_path, base=5)
    assert "there is no version 5 to use as base; the versions are [0]" in str(error)
    assert numbers(tmp_path) == [0]


def test_a_delta_is_refused_for_a_base_without_checksums(tmp_path: Path) -> None:
    first = publish(model(), tmp_path)
    (Path(first.path) / "torch_ckpt.checksums").unlink()
    error = refusal(model(), tmp_path, delta=True)
    assert "has no checksums" in str(error)
    assert numbers(tmp_path) == [0]
    assert sorted(os.listdir(tmp_path)) == ["0000000000", "latest"]


# --- retention -----------------------------------------------------------------------------------


def test_only_the_newest_versions_are_kept(tmp_path: Path) -> None:
    for seed in range(5):
        publish(model(seed), tmp_path, keep=2)
    assert numbers(tmp_path) == [3, 4]


def test_rules_and_pins_choose_the_versions_to_keep(tmp_path: Path) -> None:
    publish(model(), tmp_path, version=3)
    open_steps(tmp_path).set_pinned(3, True)
    for number in (10, 11, 20, 21):
        publish(model(), tmp_path, version=number, keep=Retention(keep_every=10))
    assert numbers(tmp_path) == [3, 10, 20, 21]


def test_a_version_that_is_being_read_is_kept(tmp_path: Path) -> None:
    first = publish(model(), tmp_path)
    reading = OpenDirectory(first.path)
    assert reading.share()
    publish(model(), tmp_path, keep=1)
    assert numbers(tmp_path) == [0, 1]
    reading.close()
    publish(model(), tmp_path, keep=1)
    assert numbers(tmp_path) == [2]


def test_a_version_that_cannot_be_deleted_does_not_fail_the_publication(tmp_path: Path) -> None:
    publish(model(), tmp_path)
    with failing("rmtree", errno.EACCES):
        publish(model(), tmp_path, keep=1)
    assert numbers(tmp_path) == [1]
    publish(model(), tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["0000000001", "0000000002", "latest"]


def test_latest_leaves_a_version_that_is_deleted(tmp_path: Path) -> None:
    for seed in range(3):
        publish(model(seed), tmp_path)
    steps = open_steps(tmp_path)
    assert steps.delete(2)
    assert os.readlink(tmp_path / "latest") == "0000000001"
    assert_equal(loaded(tmp_path / "latest"), model(1))
    assert steps.delete(0)
    assert os.readlink(tmp_path / "latest") == "0000000001"
    assert steps.delete(1)
    assert os.listdir(tmp_path) == []


def test_a_rule_that_fails_does_not_fail_the_publication(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def should_keep(_: object) -> bool:
        raise RuntimeError("no rule")

    for _ in range(2):
        publish(model(), tmp_path, keep=Retention(should_keep=should_keep))
    assert numbers(tmp_path) == [0, 1]
    assert "versions could not be deleted: no rule" in caplog.text


# --- failures ------------------------------------------------------------------------------------


def test_a_failed_publication_leaves_the_version_before(tmp_path: Path) -> None:
    publish(model(), tmp_path)
    for call in ("pwrite", "fsync", "rename"):
        with failing(call, errno.ENOSPC):
            assert isinstance(refusal(model(2), tmp_path), OSError), call
        assert_equal(loaded(tmp_path / "latest"), model())
        assert sorted(os.listdir(tmp_path)) == ["0000000000", "latest"], call


def test_the_next_publication_repairs_the_link(tmp_path: Path) -> None:
    publish(model(), tmp_path)
    with failing("symlink", errno.ENOSPC):
        error = refusal(model(2), tmp_path)
    assert "0000000001 is published, but latest does not lead to it" in str(error)
    assert_equal(loaded(tmp_path), model(2))
    assert_equal(loaded(tmp_path / "latest"), model())
    refusal(model(3), tmp_path, version=0)
    assert os.readlink(tmp_path / "latest") == "0000000001"


def test_a_version_is_published_on_a_file_system_without_links(tmp_path: Path) -> None:
    for seed in (1, 2):
        with failing("symlink", errno.EPERM), pytest.warns(match="latest does not lead to the"):
            publish(model(seed), tmp_path)
        assert_equal(loaded(tmp_path), model(seed))
    assert sorted(os.listdir(tmp_path)) == ["0000000000", "0000000001"]


def test_a_root_with_the_checkpoints_of_a_run_is_refused(tmp_path: Path) -> None:
    with torch_ckpt.CheckpointManager(tmp_path) as manager:
        manager.save(3, {"x": torch.ones(3)})
    before = sorted(os.listdir(tmp_path))
    error = refusal(model(), tmp_path)
    assert "0000000003 is a checkpoint, which a run saved; publish to another root" in str(error)
    assert sorted(os.listdir(tmp_path)) == before


def test_leftovers_of_killed_publications_are_removed(tmp_path: Path) -> None:
    publish(model(), tmp_path)
    for name in (f".0000000007.tmp-{'a' * 32}", "0000000003.deleted-0123abcd"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"x")
    publish(model(), tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["0000000000", "0000000001", "latest"]


def test_a_file_named_latest_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("precious")
    error = refusal(model(), tmp_path)
    assert isinstance(error, FileExistsError)
    assert sorted(os.listdir(tmp_path)) == ["latest"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"overwrite": True}, TypeError, "a version never changes"),
        ({"overwrit": True}, TypeError, "publish.* unexpected keyword argument 'overwrit'"),
        ({"base": "newest"}, TypeError, 'base must be the number of a version or "latest"'),
        ({"keep": "2"}, TypeError, "keep must be a number or a torch_ckpt.Retention"),
        ({"keep": True}, TypeError, "keep must be a number or a torch_ckpt.Retention"),
        ({"version": -1}, ValueError, "step must be between 0"),
        ({"keep": 0}, ValueError, "keep_last must be positive"),
    ],
)
def test_wrong_options_are_refused(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        publish(model(), tmp_path, **options)
