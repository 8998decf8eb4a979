"""Kills of publications, and of the application of deltas, before each of their system calls; and
flipped bits in deltas."""

from __future__ import annotations

import os
import random
import shutil
from contextlib import closing
from pathlib import Path

import pytest

import torch_ckpt
from tests.crash.test_kills import killed
from tests.interposed import Order, Server
from tests.support import StateDict, assert_equal
from tests.sweeps import (
    NEW,
    NEXT,
    OLD,
    PUBLISH,
    SEED,
    SWEEPING,
    TORTURE,
    Bench,
    Counts,
    Scenario,
    found_in,
    points,
    publish,
    scenarios,
    tensors_of,
)
from torch_ckpt import _core
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.steps import open_steps

pytestmark = SWEEPING

COUNTS = Counts("publications", "points", "old", "new", "refused", "violations")

NAMES = {OLD: "old", NEW: "new", NEXT: "next"}


def versions_in(root: Path) -> set[int]:
    """Returns the versions beneath a root, each of which must be complete."""
    found = set()
    for info in open_steps(root).entries(leftovers=False):
        assert found_in(Path(info.path)) == NAMES[info.step]
        if "torch_ckpt.delta" in os.listdir(info.path):
            with closing(OpenDirectory(info.path)) as opened:
                base = int(_core.Delta(opened, "torch_ckpt.delta").base)
            copy = {name: value.clone() for name, value in tensors_of(base).items()}
            torch_ckpt.apply_delta(info.path, copy)
            assert_equal(copy, tensors_of(info.step))
        found.add(info.step)
    return found


@scenarios(PUBLISH, PUBLISH[-1])
def test_a_killed_publication_leaves_complete_versions_and_latest_leads_to_one(
    server: Server, bench: Bench, scenario: Scenario
) -> None:
    for call, root in killed(server, bench, scenario, 40):
        versions = versions_in(root)
        latest = root / "latest"
        COUNTS.add("publish", "points", "new" if NEW in versions else "old")
        assert not scenario.overwrites or versions, call
        if os.path.lexists(latest):
            assert found_in(latest) in ("old", "new"), call
        else:
            # Only a first version can lack the link.
            assert not scenario.overwrites, call
        publish(str(root), NEXT, 4)
        assert versions_in(root) == {NEXT}, call
        assert found_in(latest) == "next"
        assert sorted(os.listdir(root)) == [f"{NEXT:010d}", "latest"], call


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the version NEW and its delta, and a copy of the version OLD."""
    path = tmp_path_factory.mktemp("published")
    publish(str(path / "root"), OLD, 4)
    shutil.copytree(path / "root" / f"{OLD:010d}", path / "weights")
    publish(str(path / "root"), NEW, 4)
    return path


def apply_to(directory: str, delta: str) -> None:
    torch_ckpt.apply_delta(delta, directory)


def test_a_directory_to_which_a_killed_process_applied_a_delta_is_the_old_or_the_new_one(
    server: Server, tmp_path: Path, published: Path
) -> None:
    delta = str(published / "root" / "latest" / "torch_ckpt.delta")
    tree = tmp_path / "tree"
    weights = tree / "weights"

    def fresh() -> None:
        shutil.rmtree(tree, ignore_errors=True)
        shutil.copytree(published / "weights", weights)

    fresh()
    sound = server.run(Order(), tree, apply_to, str(weights), delta)
    assert sound.error is None
    assert found_in(weights) == "new"
    for number in points(sound.numbered, 40, "kills of apply"):
        fresh()
        run = server.run(Order("kill", number), tree, apply_to, str(weights), delta)
        if run.hit is None:
            assert number > 1
            return
        found = found_in(weights)
        COUNTS.add("apply_delta", "points", found)
        assert found in ("old", "new"), run.hit
        if found == "old":
            apply_to(str(weights), delta)
        else:
            torch_ckpt.save(tensors_of(NEXT), weights, format="safetensors", no_dist=True)
        assert os.listdir(tree) == ["weights"], run.hit


def test_a_flipped_bit_in_a_delta_changes_nothing(tmp_path: Path, published: Path) -> None:
    sound = (published / "root" / "latest" / "torch_ckpt.delta").read_bytes()
    choice = random.Random(SEED)
    for _ in range(200 if TORTURE else 40):
        contents = bytearray(sound)
        # Half of the bits are in the contents, which follow the payloads.
        begin = 0 if choice.random() < 0.5 else max(0, len(sound) - 4000)
        contents[choice.randrange(begin, len(sound))] ^= 1 << choice.randrange(8)
        delta = tmp_path / "flipped.delta"
        delta.write_bytes(contents)
        state: StateDict = {name: value.clone() for name, value in tensors_of(OLD).items()}
        with pytest.raises(torch_ckpt.Corrupt):
            torch_ckpt.apply_delta(delta, state)
        assert_equal(state, tensors_of(OLD))
        with pytest.raises(torch_ckpt.Corrupt):
            torch_ckpt.apply_delta(delta, published / "weights")
        assert found_in(published / "weights") == "old"
        COUNTS.add("flips", "points", "refused")


def test_a_flipped_bit_in_the_base_changes_nothing(tmp_path: Path, published: Path) -> None:
    delta = published / "root" / "latest" / "torch_ckpt.delta"
    choice = random.Random(SEED)
    for _ in range(200 if TORTURE else 20):
        weights = tmp_path / "weights"
        shutil.copytree(published / "weights", weights)
        file = choice.choice(sorted(weights.glob("*.safetensors")))
        contents = bytearray(file.read_bytes())
        contents[choice.randrange(len(contents))] ^= 1 << choice.randrange(8)
        file.write_bytes(contents)
        with pytest.raises(torch_ckpt.CheckpointError):
            torch_ckpt.apply_delta(delta, weights)
        assert file.read_bytes() == contents
        assert os.listdir(tmp_path) == ["weights"]
        shutil.rmtree(weights)
        COUNTS.add("flips", "points", "refused")
