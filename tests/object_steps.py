"""Steps beneath URLs for tests: fixtures, saves, loads and checks."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.object_server import BUCKET, Fault, ObjectServer, Request, s3_fault
from tests.support import assert_equal, random_tensor, save_step
from torch_ckpt import ReadOptions, WriteOptions
from torch_ckpt.checkpoint.marker import LAST_SAVED_NAME
from torch_ckpt.options import DEFAULT_OPTIONS
from torch_ckpt.steps import MARKER_NAME
from torch_ckpt.steps.object_steps import LEFTOVER_SECONDS, ObjectSteps

ATTEMPT = "0123abcd"

# Limit of waits that should not block, in seconds.
PATIENCE = 60.0

#: The refusal of a request that is not repeated.
DENIED = s3_fault(403, "AccessDenied")

KINDS = ["memory", "s3"]


@pytest.fixture
def s3() -> Iterator[ObjectServer]:
    """A server whose answers a test chooses."""
    pytest.importorskip("obstore")
    with ObjectServer().running() as running:
        yield running


@pytest.fixture
def s3_steps(s3: ObjectServer) -> ObjectSteps:
    """Empty root on ``server``."""
    return ObjectSteps(f"s3://{BUCKET}/run", s3.options)


@pytest.fixture(params=KINDS)
def steps(request: pytest.FixtureRequest) -> ObjectSteps:
    """Empty root on each kind of store."""
    if request.param == "memory":
        return ObjectSteps(f"memory://{uuid.uuid4().hex}/run")
    found: ObjectSteps = request.getfixturevalue("s3_steps")
    return found


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
    steps: ObjectSteps,
    step: int,
    state: dict[str, Any],
    write: WriteOptions = DEFAULT_OPTIONS,
    **options: Any,
) -> None:
    save_step(steps, step, state, write, attempt=ATTEMPT, **options)


def loaded(steps: ObjectSteps, step: int, **options: Any) -> dict[str, Any]:
    state = blank()
    steps.load(step, state, no_dist=True, **options)
    return state


def names_of(steps: ObjectSteps) -> list[str]:
    """Lists the objects of a root, without the record of the last save."""
    return sorted({entry.name for entry in steps._store.list()} - {LAST_SAVED_NAME})


def put(steps: ObjectSteps, name: str, data: bytes) -> None:
    steps._store.put(name, [memoryview(data)], len(data))


def read(steps: ObjectSteps, name: str) -> bytes:
    return steps._store.read(name, 1 << 30)[0]


def marker_of(steps: ObjectSteps, step: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(read(steps, f"{step:010d}/{MARKER_NAME}"))
    return found


def kinds_of(steps: ObjectSteps) -> dict[int, str]:
    return {entry.step: entry.state for entry in steps.entries()}


def failing(kind: str, part: str, fault: Fault = DENIED) -> Callable[[Request], Fault | None]:
    """Makes a ``fault`` for requests of a kind, for keys with this part."""
    return lambda request: fault if request.kind == kind and part in request.key else None


def calling(function: Callable[[Request], object]) -> Callable[[Request], Fault | None]:
    """Makes a ``fault`` that calls a function for each request, except for the requests of the
    function, and changes no answer."""
    inside: list[bool] = []

    def fault(request: Request) -> None:
        if not inside:
            inside.append(True)
            try:
                function(request)
            finally:
                inside.clear()

    return fault


def which(steps: ObjectSteps) -> str:
    """Identifies the save in step 1 by all of its values; "none" if the step is not complete."""
    if kinds_of(steps) != {1: "complete"}:
        with pytest.raises(dcp.CheckpointException, match=f"{MARKER_NAME} is missing"):
            loaded(steps, 1)
        return "none"
    state = loaded(steps, 1)
    seed = int(state["step"])
    assert_equal(state, state_of(seed))
    return {1: "old", 2: "new"}[seed]


def make_old(s3: ObjectServer) -> None:
    """Backdates all objects to before the oldest save that may still be running."""
    written = datetime.now(timezone.utc) - timedelta(seconds=LEFTOVER_SECONDS + 1)
    for stored in s3.objects.values():
        stored.modified = written


def options_of(s3: ObjectServer) -> ReadOptions:
    return ReadOptions(storage_options=s3.options)
