"""Steps at URLs for tests: fixtures, saves, loads and checks."""

from __future__ import annotations

import errno
import uuid
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.remote_stores import BUCKET, Hooked, hooked, hooked_url, s3_server
from tests.support import assert_equal, random_tensor, save_step
from torch_ckpt import WriteOptions
from torch_ckpt.options import DEFAULT_OPTIONS
from torch_ckpt.steps import MARKER_NAME
from torch_ckpt.steps.remote import LEFTOVER_SECONDS, RemoteSteps

ATTEMPT = "0123abcd"

# Limit of waits that should not block, in seconds.
PATIENCE = 60.0

KINDS = ["memory", "file", "s3"]


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    with s3_server() as settings:
        yield settings


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    path = tmp_path / "staging"
    path.mkdir()
    return path


@pytest.fixture(params=KINDS)
def steps(
    request: pytest.FixtureRequest, staging: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> RemoteSteps:
    """Empty root on each kind of file system."""
    name = uuid.uuid4().hex
    if request.param == "s3":
        settings = request.getfixturevalue("s3")
        monkeypatch.setitem(fsspec.config.conf, "s3", settings)
        return RemoteSteps(f"s3://{BUCKET}/{name}", staging)
    root = f"memory://{name}/run" if request.param == "memory" else f"file://{tmp_path}/run"
    return RemoteSteps(root, staging)


@pytest.fixture
def flaky(staging: Path) -> RemoteSteps:
    """Root on a file system that can fail; see ``hooked``."""
    return RemoteSteps(hooked_url(), staging)


@pytest.fixture
def unanswered(flaky: RemoteSteps, staging: Path) -> RemoteSteps:
    """Root of ``flaky``, but the first request for each marker is carried out and then fails."""
    return RemoteSteps(flaky.root.replace("hooked", "unanswered"), staging)


def state_of(seed: int = 0) -> dict[str, Any]:
    return {
        "model": {
            "large": random_tensor((300, 1000), torch.float32, seed),
            "transposed": random_tensor((7, 5), torch.bfloat16, seed + 1).t(),
            "empty": torch.empty(0, 3),
        },
        "step": torch.tensor(seed),
        "note": f"state {seed}",
    }


def blank() -> dict[str, Any]:
    return {
        "model": {
            "large": torch.zeros(300, 1000),
            "transposed": torch.zeros(5, 7, dtype=torch.bfloat16),
            "empty": torch.empty(0, 3),
        },
        "step": torch.tensor(-1),
        "note": "",
    }


def save(
    steps: RemoteSteps,
    step: int,
    state: dict[str, Any],
    write: WriteOptions = DEFAULT_OPTIONS,
    **options: Any,
) -> None:
    save_step(steps, step, state, write, attempt=ATTEMPT, **options)


def loaded(steps: RemoteSteps, step: int, **options: Any) -> dict[str, Any]:
    state = blank()
    steps.load(step, state, no_dist=True, **options)
    return state


def names_of(steps: RemoteSteps) -> list[str]:
    return sorted(steps._files.list())


def kinds_of(steps: RemoteSteps) -> dict[int, str]:
    return {entry.step: entry.state for entry in steps.entries()}


def fail_at(kind: str, part: str, error: Exception | None = None) -> Any:
    def hook(of: str, path: str) -> None:
        if of == kind and part in path:
            raise error or PermissionError("denied")

    return hooked(hook)


def failing_at_the_end(kind: str, name: str) -> Any:
    """Makes a hook that fails requests of a kind for paths that end in this name."""

    def hook(of: str, path: str) -> None:
        if of == kind and path.rstrip("/").endswith(f"/{name}"):
            raise PermissionError(errno.EACCES, "denied", path)

    return hook


def which(steps: RemoteSteps) -> str:
    """Identifies the save in step 1 by all of its values; "none" if the step is not complete."""
    if kinds_of(steps) != {1: "complete"}:
        with pytest.raises(dcp.CheckpointException, match=f"{MARKER_NAME} is missing"):
            loaded(steps, 1)
        return "none"
    state = loaded(steps, 1)
    seed = int(state["step"])
    assert_equal(state, state_of(seed))
    return {1: "old", 2: "new"}[seed]


def make_old(flaky: RemoteSteps) -> None:
    """Backdates all files to before the oldest save that may still be running."""
    written = datetime.now(timezone.utc) - timedelta(seconds=LEFTOVER_SECONDS + 1)
    place = Hooked._strip_protocol(flaky.root)
    for path, file in Hooked.store.items():
        if path.startswith(place):
            file.created = written
