"""torch_ckpt.save and torch_ckpt.load, which write and read the files of dcp.save and dcp.load."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

import torch_ckpt
from tests.fault_hooks import at_fault_points
from tests.metadata import read_metadata
from tests.support import (
    assert_equal,
    cause_of,
    data_files,
    emptied,
    f32,
    nested_state,
    save,
    stock_load,
    stock_save,
)
from torch_ckpt.publication.publish import async_publish

StateDict = dict[str, Any]


def full_state() -> StateDict:
    """Makes a state with every kind of tensor, and a parameter."""
    return {**nested_state(), "scale": torch.nn.Parameter(f32(5, seed=2))}


@pytest.mark.parametrize("planner", [None, dcp.DefaultSavePlanner()])
def test_save_accepts_a_function_that_returns_the_state(
    tmp_path: Path, planner: dcp.SavePlanner | None
) -> None:
    torch_ckpt.save(full_state, tmp_path / "c", planner=planner)
    loaded = emptied(full_state())
    torch_ckpt.load(loaded, tmp_path / "c")
    assert_equal(loaded, full_state())


def test_a_function_that_returns_no_state_fails_the_save(tmp_path: Path) -> None:
    def fail() -> StateDict:
        raise RuntimeError("no state")

    with pytest.raises(dcp.CheckpointException) as caught:
        torch_ckpt.save(fail, tmp_path / "c")
    assert str(cause_of(caught.value)) == "no state"
    assert not (tmp_path / "c" / ".metadata").exists()


@pytest.mark.parametrize(
    ("saver", "loader"), [(torch_ckpt.save, stock_load), (stock_save, torch_ckpt.load)]
)
def test_stock_torch_reads_what_save_wrote_and_load_reads_what_it_wrote(
    tmp_path: Path, saver: Callable[..., Any], loader: Callable[..., Any]
) -> None:
    saver(full_state(), tmp_path)
    loaded = emptied(full_state())
    loader(loaded, tmp_path)
    assert_equal(loaded, full_state())


def described(metadata: Metadata) -> list[tuple[Any, ...]]:
    """Returns each name with what a load uses of its description."""
    found: list[tuple[Any, ...]] = []
    for name, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, dcp.TensorStorageMetadata):
            kind = (stored.properties.dtype, stored.properties.requires_grad)
            found.append((name, stored.size, stored.chunks, *kind))
        else:
            found.append((name, type(stored)))
    return found


def test_the_metadata_is_that_of_dcp_save(tmp_path: Path) -> None:
    ours = torch_ckpt.save(full_state(), tmp_path / "ours").metadata()
    dcps = save(full_state(), tmp_path / "dcp")
    assert described(ours) == described(dcps)
    assert ours.planner_data == dcps.planner_data
    assert set(ours.storage_data) == set(dcps.storage_data)


def test_a_missing_checkpoint_is_an_error_of_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(dcp.CheckpointException) as error:
        torch_ckpt.load({"t": torch.ones(3)}, tmp_path)
    cause = cause_of(error.value)
    assert isinstance(cause, FileNotFoundError)
    assert "no committed checkpoint" in str(cause)
    assert cause.filename == str(tmp_path)


def test_a_custom_planner_is_used(tmp_path: Path) -> None:
    class Renaming(dcp.DefaultSavePlanner):
        def set_up_planner(self, state_dict: StateDict, *args: Any, **kwargs: Any) -> None:
            renamed = {f"new.{key}": value for key, value in state_dict.items()}
            super().set_up_planner(renamed, *args, **kwargs)

    torch_ckpt.save({"t": torch.ones(3)}, tmp_path / "c", planner=Renaming())
    loaded = {"new.t": torch.zeros(3)}
    torch_ckpt.load(loaded, tmp_path / "c", planner=dcp.DefaultLoadPlanner())
    assert_equal(loaded, {"new.t": torch.ones(3)})


WRONG_OPTIONS: list[tuple[StateDict, str]] = [
    ({"check_replicas": "all"}, "check_replicas must be one of"),
    ({"checkpoint_id": ""}, "checkpoint_id is empty"),
    ({"format": "gguf"}, "format must be one of 'checkpoint', 'safetensors', got 'gguf'"),
]
WRONG_OPTIONS_OF_ASYNC_SAVE: list[tuple[StateDict, str]] = [
    ({"staging": "later"}, "staging must be one of 'blocking', 'overlapped', got 'later'"),
    ({"if_busy": "skip"}, "if_busy must be one of 'wait', 'raise', got 'skip'"),
]


CALLS_WITH_WRONG_OPTIONS = [
    *((call, *row) for call in (torch_ckpt.save, torch_ckpt.async_save) for row in WRONG_OPTIONS),
    *((torch_ckpt.async_save, *row) for row in WRONG_OPTIONS_OF_ASYNC_SAVE),
    (torch_ckpt.load, {"checkpoint_id": ""}, "checkpoint_id is empty"),
]


@pytest.mark.parametrize(
    ("call", "options", "message"),
    CALLS_WITH_WRONG_OPTIONS,
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", ""),
)
def test_contradicting_options_are_an_error_of_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[..., Any],
    options: StateDict,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=re.escape(message)):
        call({}, **({"checkpoint_id": tmp_path / "c"} | options))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", [torch_ckpt.save, torch_ckpt.async_save])
@pytest.mark.parametrize(
    ("options", "instead"),
    [
        ({"thread_count": 2}, "options=torch_ckpt.WriteOptions(thread_count=...)"),
        ({"dtype": "bf16"}, "format=torch_ckpt.Safetensors(dtype=...)"),
    ],
)
def test_a_former_keyword_is_refused_with_the_object_that_has_it(
    call: Callable[..., Any], options: StateDict, instead: str, tmp_path: Path
) -> None:
    with pytest.raises((TypeError, dcp.CheckpointException), match=re.escape(instead)):
        call({}, tmp_path / "c", **options)
    assert not (tmp_path / "c").exists()


#: Functions with options, by the type of the options.
WITH_OPTIONS: list[tuple[str, Callable[..., Any]]] = [
    *(("WriteOptions", call) for call in (torch_ckpt.save, torch_ckpt.async_save)),
    *(("WriteOptions", call) for call in (torch_ckpt.publish, async_publish)),
    ("WriteOptions", lambda _state, root, options: torch_ckpt.Export(root, options=options)),
    *(("ReadOptions", call) for call in (torch_ckpt.load, torch_ckpt.preflight)),
    ("ReadOptions", torch_ckpt.estimate_read_memory),
    ("ReadOptions", lambda _state, path, options: torch_ckpt.open(path, options=options)),
]


@pytest.mark.parametrize(("kind", "call"), WITH_OPTIONS)
@pytest.mark.parametrize("options", [{}, None, torch_ckpt.Background()], ids=str)
def test_options_of_another_kind_are_refused(
    kind: str, call: Callable[..., Any], options: Any, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match=rf"options must be a torch_ckpt\.{kind}, got"):
        call({}, tmp_path / "c", options=options)
    assert not (tmp_path / "c").exists()


def test_a_format_and_a_background_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"format must be a torch_ckpt\.Safetensors, got"):
        torch_ckpt.publish({}, tmp_path / "c", format="safetensors")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"background must be a torch_ckpt\.Background, got None"):
        torch_ckpt.WriteOptions(background=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("call", [torch_ckpt.save, torch_ckpt.async_save, torch_ckpt.load])
def test_an_unknown_option_names_the_called_function(
    call: Callable[..., Any], tmp_path: Path
) -> None:
    text = rf"^{call.__name__}\(\) got an unexpected keyword argument 'tread_count'; did you mean"
    with pytest.raises(TypeError, match=text):
        call({}, tmp_path / "c", tread_count=2)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("call", [torch_ckpt.save, torch_ckpt.async_save])
def test_swapped_arguments_are_refused_with_the_right_order(
    call: Callable[..., Any], tmp_path: Path
) -> None:
    match = rf"path, got a dict\. Pass the state dict first: {call.__name__}\(state_dict, path\)"
    with pytest.raises(TypeError, match=match):
        call(str(tmp_path / "c"), {"t": torch.ones(3)})
    assert not (tmp_path / "c").exists()


def test_a_local_path_may_contain_colons(tmp_path: Path) -> None:
    for name in ("a:b", "./a://b", Path("s3://bucket/run")):
        torch_ckpt.save({"t": torch.ones(3)}, tmp_path / name)
        assert data_files(tmp_path / name)
    torch_ckpt.save({"t": torch.ones(3)}, f"{tmp_path}/c://d")
    assert data_files(tmp_path / "c:" / "d")


def test_a_save_returns_the_path_the_metrics_and_the_metadata(tmp_path: Path) -> None:
    saved = torch_ckpt.save({"t": torch.ones(2), "step": 3}, tmp_path / "c", no_dist=True)
    assert saved.path == str(tmp_path / "c")
    assert saved.metrics.total_s > saved.metrics.commit_s > 0
    assert saved.metadata() == read_metadata(tmp_path / "c")
    assert type(saved.metadata()) is Metadata


@pytest.mark.parametrize("planner", [None, dcp.DefaultSavePlanner()])
def test_the_stored_metadata_has_only_classes_of_torch(
    tmp_path: Path, planner: dcp.SavePlanner | None
) -> None:
    torch_ckpt.save({"w": f32(3)}, tmp_path, planner=planner)
    data = (tmp_path / ".metadata").read_bytes()
    assert b"torch_ckpt.saving" not in data
    metadata = pickle.loads(data)
    assert type(metadata.storage_meta) is StorageMeta
    assert metadata.storage_meta.checkpoint_id == str(tmp_path)


def test_a_tensor_is_saved_from_the_memory_that_it_had_if_its_data_is_replaced_during_the_save(
    tmp_path: Path,
) -> None:
    # So large that the allocator returns freed memory to the system.
    tensor = torch.arange(1 << 23)

    def replace(operation: str, _path: str) -> int:
        if operation == "engine begins":
            tensor.data = torch.empty(0, dtype=tensor.dtype)
        return 0

    with at_fault_points(replace):
        torch_ckpt.save({"tensor": tensor}, tmp_path / "checkpoint")
    loaded = {"tensor": torch.empty(1 << 23, dtype=tensor.dtype)}
    torch_ckpt.load(loaded, tmp_path / "checkpoint")
    assert torch.equal(loaded["tensor"], torch.arange(1 << 23))


def test_one_lazily_negated_tensor_among_hundreds_is_saved_and_filled_with_its_values(
    tmp_path: Path,
) -> None:
    state = {str(i): torch.full((4,), float(i)) for i in range(300)}
    state["200"] = torch._neg_view(state["200"])
    torch_ckpt.save(state, tmp_path)
    target = {name: torch.zeros(4) for name in state}
    target["100"] = torch._neg_view(target["100"])
    torch_ckpt.load(target, tmp_path)
    assert all(torch.equal(target[name], state[name]) for name in state)
