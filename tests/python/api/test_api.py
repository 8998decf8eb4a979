"""torch_ckpt.save and torch_ckpt.load, which write and read the files of dcp.save and dcp.load."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

import torch_ckpt
from tests.metadata import read_metadata
from tests.support import (
    assert_equal,
    cause_of,
    data_files,
    random_tensor,
    save,
    stock_load,
    stock_save,
    zeros,
)

StateDict = dict[str, Any]


def nested_state() -> StateDict:
    """Makes a state with one value of each kind that a plain state dict may hold."""
    return {
        "model": {
            "weight": random_tensor((33, 17), torch.float32, seed=1),
            "scale": torch.nn.Parameter(random_tensor((5,), torch.float32, seed=2)),
            "transposed": random_tensor((6, 9), torch.bfloat16, seed=3).t(),
            "view": random_tensor((40,), torch.int64, seed=4)[7:29:3],
            "scalar": torch.tensor(3.5),
            "empty": torch.empty(0, 4),
        },
        "optimizer": {"groups": {"inner": {"lr": 0.1, "betas": (0.9, 0.95)}}, "step": 12},
        "history": [random_tensor((3,), torch.float64, seed=5), "text"],
    }


def blank(value: Any) -> Any:
    """Makes the same structure with other values, for a load to replace."""
    if isinstance(value, torch.Tensor):
        return zeros(tuple(value.shape), value.dtype)
    if isinstance(value, dict):
        return {key: blank(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [blank(inner) for inner in value]
    return None


@pytest.mark.parametrize("planner", [None, dcp.DefaultSavePlanner()])
def test_save_accepts_a_function_that_returns_the_state(
    tmp_path: Path, planner: dcp.SavePlanner | None
) -> None:
    torch_ckpt.save(nested_state, tmp_path / "c", planner=planner)
    loaded = blank(nested_state())
    torch_ckpt.load(loaded, tmp_path / "c")
    assert_equal(loaded, nested_state())


def test_a_function_that_returns_no_state_fails_the_save(tmp_path: Path) -> None:
    def fail() -> StateDict:
        raise RuntimeError("no state")

    with pytest.raises(dcp.CheckpointException) as caught:
        torch_ckpt.save(fail, tmp_path / "c")
    assert str(cause_of(caught.value)) == "no state"
    assert not (tmp_path / "c" / ".metadata").exists()


def test_stock_torch_reads_what_save_wrote(tmp_path: Path) -> None:
    state = nested_state()
    torch_ckpt.save(state, tmp_path / "c")
    loaded = blank(state)
    stock_load(loaded, tmp_path / "c")
    assert_equal(loaded, state)


def test_load_reads_what_stock_torch_wrote(tmp_path: Path) -> None:
    state = nested_state()
    stock_save(state, tmp_path / "c")
    loaded = blank(state)
    torch_ckpt.load(loaded, tmp_path / "c")
    assert_equal(loaded, state)


def test_the_metadata_is_that_of_dcp_save(tmp_path: Path) -> None:
    state = nested_state()
    ours = torch_ckpt.save(state, tmp_path / "ours")
    dcps = save(state, tmp_path / "dcp")
    assert list(ours.state_dict_metadata) == list(dcps.state_dict_metadata)
    assert ours.planner_data == dcps.planner_data
    assert set(ours.storage_data) == set(dcps.storage_data)
    for name, stored in ours.state_dict_metadata.items():
        other = dcps.state_dict_metadata[name]
        if not isinstance(stored, dcp.TensorStorageMetadata):
            assert type(stored) is type(other)
            continue
        assert isinstance(other, dcp.TensorStorageMetadata)
        assert (stored.size, stored.chunks) == (other.size, other.chunks)
        assert stored.properties.dtype == other.properties.dtype
        assert stored.properties.requires_grad == other.properties.requires_grad


class Counter:
    """Stateful that records the loaded state."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.weight = torch.full((4,), float(count))

    def state_dict(self) -> StateDict:
        return {"count": self.count, "weight": self.weight}

    def load_state_dict(self, state: StateDict) -> None:
        self.count = state["count"]
        self.weight = state["weight"]


def test_stateful_values_are_saved_and_restored_by_their_methods(tmp_path: Path) -> None:
    torch_ckpt.save({"counter": Counter(7)}, tmp_path / "c")
    loaded = Counter(0)
    torch_ckpt.load({"counter": loaded}, tmp_path / "c")
    assert loaded.count == 7
    assert torch.equal(loaded.weight, torch.full((4,), 7.0))


def test_a_missing_checkpoint_is_an_error_of_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(dcp.CheckpointException) as error:
        torch_ckpt.load({"t": torch.ones(3)}, tmp_path)
    cause = cause_of(error.value)
    assert isinstance(cause, FileNotFoundError)
    assert "no committed checkpoint" in str(cause)
    assert cause.filename == str(tmp_path)


def test_a_failed_save_keeps_the_old_checkpoint_and_leaves_no_file(tmp_path: Path) -> None:
    old = {"t": torch.ones(300_000)}
    torch_ckpt.save(old, tmp_path / "c")
    before = sorted((tmp_path / "c").iterdir())

    class Unpicklable:
        def __reduce__(self) -> Any:
            raise RuntimeError("does not pickle")

    with pytest.raises(dcp.CheckpointException, match="does not pickle"):
        torch_ckpt.save({"t": torch.zeros(300_000), "o": Unpicklable()}, tmp_path / "c")
    assert sorted((tmp_path / "c").iterdir()) == before
    loaded = {"t": torch.zeros(300_000)}
    torch_ckpt.load(loaded, tmp_path / "c")
    assert_equal(loaded, old)


def test_a_custom_planner_is_used(tmp_path: Path) -> None:
    class Renaming(dcp.DefaultSavePlanner):
        def set_up_planner(self, state_dict: StateDict, *args: Any, **kwargs: Any) -> None:
            renamed = {f"new.{key}": value for key, value in state_dict.items()}
            super().set_up_planner(renamed, *args, **kwargs)

    torch_ckpt.save({"t": torch.ones(3)}, tmp_path / "c", planner=Renaming())
    loaded = {"new.t": torch.zeros(3)}
    torch_ckpt.load(loaded, tmp_path / "c", planner=dcp.DefaultLoadPlanner())
    assert_equal(loaded, {"new.t": torch.ones(3)})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "Pass a checkpoint_id or a FileSystemWriter"),
        ({"checkpoint_id": "c", "thread_count": 0}, "thread_count must be at least 1"),
        (
            {"storage_writer": "mine", "thread_count": 2},
            "thread_count cannot be combined with a FileSystemWriter",
        ),
        ({"storage_writer": "mine"}, r"expected a torch_ckpt.FileSystemWriter, got str"),
    ],
)
def test_contradicting_options_are_an_error_of_one_sentence(
    arguments: StateDict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        torch_ckpt.save({}, **arguments)


@pytest.mark.parametrize("call", [torch_ckpt.save, torch_ckpt.async_save, torch_ckpt.load])
def test_an_unknown_option_names_the_called_function(
    call: Callable[..., Any], tmp_path: Path
) -> None:
    text = rf"^{call.__name__}\(\) got an unexpected keyword argument 'tread_count'; did you mean"
    with pytest.raises(TypeError, match=text):
        call({}, tmp_path / "c", tread_count=2)
    assert not (tmp_path / "c").exists()


URLS = ["s3://bucket/run", "file:///tmp/x", "memory://a"]
OURS: dict[str, Callable[[str], Any]] = {
    "save": lambda url: torch_ckpt.save({}, url, no_dist=True),
    "save with a writer": lambda url: torch_ckpt.save(
        {}, url, storage_writer=torch_ckpt.FileSystemWriter("c"), no_dist=True
    ),
    "async_save": lambda url: torch_ckpt.async_save({}, url, no_dist=True).result(),
    "load": lambda url: torch_ckpt.load({}, url, no_dist=True),
    "preflight": lambda url: torch_ckpt.preflight({}, url),
    "AsyncCheckpoint.write": lambda url: torch_ckpt.AsyncCheckpoint().write(url),
    "AsyncCheckpoint.read": lambda url: torch_ckpt.AsyncCheckpoint({}, {"no_dist": True}).read(url),
    "FileSystemWriter": torch_ckpt.FileSystemWriter,
    "FileSystemReader": torch_ckpt.FileSystemReader,
    "dcp.save": lambda url: dcp.save(
        {}, checkpoint_id=url, storage_writer=torch_ckpt.FileSystemWriter("c"), no_dist=True
    ),
    "dcp.load": lambda url: dcp.load(
        {}, checkpoint_id=url, storage_reader=torch_ckpt.FileSystemReader("c"), no_dist=True
    ),
}


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("call", OURS)
def test_a_url_is_refused_as_a_directory(
    call: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"{url} is a URL.*CheckpointManager.*docs/remote.md"):
        OURS[call](url)
    assert list(tmp_path.iterdir()) == []


def test_a_derived_writer_or_reader_refuses_a_url_when_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Writer(torch_ckpt.FileSystemWriter):
        """Keeps the local file system."""

    class Reader(torch_ckpt.FileSystemReader):
        """Keeps the local file system."""

    monkeypatch.chdir(tmp_path)
    calls: list[Callable[[], Any]] = [
        lambda: dcp.save({}, storage_writer=Writer("s3://bucket/run"), no_dist=True),
        lambda: dcp.load({}, storage_reader=Reader("s3://bucket/run"), no_dist=True),
    ]
    for call in calls:
        with pytest.raises(dcp.CheckpointException) as caught:
            call()
        assert "s3://bucket/run is a URL" in str(cause_of(caught.value))
    assert list(tmp_path.iterdir()) == []


def test_a_local_path_may_contain_colons(tmp_path: Path) -> None:
    for name in ("a:b", "./a://b", Path("s3://bucket/run")):
        torch_ckpt.save({"t": torch.ones(3)}, tmp_path / name)
        assert data_files(tmp_path / name)
    torch_ckpt.save({"t": torch.ones(3)}, f"{tmp_path}/c://d")
    assert data_files(tmp_path / "c:" / "d")


@pytest.mark.parametrize(
    "used",
    [
        lambda metadata: metadata,
        copy.copy,
        copy.deepcopy,
        dataclasses.replace,
        lambda metadata: pickle.loads(pickle.dumps(metadata)),
    ],
    ids=["itself", "copied", "copied deeply", "replaced", "pickled"],
)
def test_the_returned_metadata_behaves_like_torchs(
    tmp_path: Path, used: Callable[[Metadata], Metadata]
) -> None:
    returned = torch_ckpt.save({"t": torch.ones(2), "step": 3}, tmp_path / "c", no_dist=True)
    assert isinstance(returned, Metadata)
    made = used(returned)
    stored = read_metadata(tmp_path / "c")
    assert made == stored
    assert stored == returned
    assert made.__class__ is Metadata


def test_the_metadata_of_two_saves_differ(tmp_path: Path) -> None:
    first, second = (
        torch_ckpt.save({"t": torch.ones(2)}, tmp_path / name, no_dist=True) for name in "ab"
    )
    assert first != second
    assert first != 3
