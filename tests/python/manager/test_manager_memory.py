"""Memory that a manager reserves in the background for the first save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.managers import Training
from torch_ckpt import CheckpointManager, WriteOptions
from torch_ckpt.manager.live_tensors import live_tensors
from torch_ckpt.saving import host_memory


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The reservations that managers request, with the number of their tensors."""
    made: list[dict[str, Any]] = []

    def reserve(tensors: Any, after: object = None, **options: Any) -> None:
        # A save requests memory after its snapshot.
        if after is None:
            made.append({"tensors": len(list(tensors))} | options)

    monkeypatch.setattr(host_memory.reserve, "make_for_state", reserve)
    return made


#: Two parameters.
_MODEL = 2
#: The parameters and their momenta.
_TRAINED = 4


def test_restore_and_the_first_call_that_does_not_save_reserve_memory(
    tmp_path: Path, requests: list[dict[str, Any]]
) -> None:
    training = Training()
    write = WriteOptions(thread_count=2, max_host_bytes=1 << 20)
    with CheckpointManager(tmp_path, interval=3, write=write) as manager:
        assert manager.restore(training.state) == 0
        for step in range(1, 4):
            training.step()
            manager.save(step, training.state)
    wanted = {"ranks": 1, "files": 2, "max_host_bytes": 1 << 20}
    assert requests == [{"tensors": _MODEL} | wanted, {"tensors": _TRAINED} | wanted]
    requests.clear()
    with CheckpointManager(tmp_path) as manager:
        manager.restore(Training().state)
    assert [request["tensors"] for request in requests] == [_TRAINED]


def test_a_first_call_that_saves_leaves_the_reservation_to_the_save(
    tmp_path: Path, requests: list[dict[str, Any]]
) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, Training().state)
    assert requests == []


def test_a_read_only_manager_reserves_no_memory(
    tmp_path: Path, requests: list[dict[str, Any]]
) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, Training().state)
    with CheckpointManager(tmp_path, read_only=True) as manager:
        manager.restore(Training().state)
    assert requests == []


class Unread:
    """A value whose state is read only for a save."""

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


class Joined(torch.optim.Optimizer):
    """An optimizer without an attribute ``state``."""

    def __init__(self) -> None:
        pass


def test_tensors_of_a_state_are_found_without_reading_states_of_other_objects() -> None:
    training = Training()
    training.step()
    tensor = torch.zeros(2)
    state = training.state | {
        "loader": Unread(),
        "joined": Joined(),
        "values": [tensor, {"t": tensor}],
    }
    found = list(live_tensors(state))
    expected = [*training.model.parameters(), tensor, tensor]
    momenta = [state["momentum_buffer"] for state in training.optimizer.state.values()]
    assert {id(one) for one in found} == {id(one) for one in [*expected, *momenta]}
