"""Saves in Hugging Face's layout beneath a URL, on a server that a test lets fail."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import torch_ckpt
from tests.object_server import BUCKET, Fault, ObjectServer, Request, Stored, s3_fault
from tests.support import StateDict, assert_equal, cause_of, random_tensor
from torch_ckpt import ReadOptions, Safetensors, WriteOptions
from torch_ckpt.errors import CheckpointError, NotCommitted

MIB = 1 << 20
URL = f"s3://{BUCKET}/exports/final"
CLAIM, INDEX = ".torch_ckpt-save", "model.safetensors.index.json"


@pytest.fixture
def server() -> Iterator[ObjectServer]:
    pytest.importorskip("obstore")
    with ObjectServer().running() as running:
        yield running


def state(fill: float = 1.0) -> StateDict:
    """A state of several parts of an upload, with tensors of any kind."""
    return {
        "large": torch.full((17 * MIB,), int(fill), dtype=torch.int8),
        "transposed": random_tensor((50, 20), torch.bfloat16, 2).t(),
        "every other": random_tensor((40, 6), torch.float32, 3)[::2, 1::2],
        "bytes": torch.full((1001,), int(fill), dtype=torch.int8),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(fill),
    }


DENIED = s3_fault(403, "AccessDenied")
#: Several files of a state.
SEVERAL = {"max_shard_size": 1000}


def save(server: ObjectServer, given: StateDict, overwrite: bool = True, **format: Any) -> None:
    options = WriteOptions(storage_options=server.options, overwrite=overwrite)
    torch_ckpt.save(given, URL, format=Safetensors(**format), options=options)


def cause(server: ObjectServer, given: StateDict, **options: Any) -> BaseException:
    with pytest.raises(dcp.CheckpointException) as caught:
        save(server, given, **options)
    return cause_of(caught.value)


def contents(server: ObjectServer) -> dict[str, bytes]:
    objects = server.objects.items()
    return {key.removeprefix("exports/final/"): stored.data for key, stored in objects}


def downloaded(server: ObjectServer, path: Path) -> StateDict:
    """Returns the tensors that the index, or else the single file, has."""
    path.mkdir()
    for name, data in contents(server).items():
        (path / name).write_bytes(data)
    names = {"model.safetensors"}
    if (path / INDEX).exists():
        names = set(json.loads((path / INDEX).read_text())["weight_map"].values())
    found: StateDict = {}
    for name in names:
        found |= safetensors.torch.load_file(path / name)
    assert torch_ckpt.verify(path).ok
    return found


def assert_stored(server: ObjectServer, path: Path, expected: StateDict) -> None:
    found = downloaded(server, path)
    assert_equal(dict(sorted(found.items())), dict(sorted(expected.items())))


def deny(kind: str, name: str) -> Any:
    def fault(request: Request) -> Fault | None:
        is_meant = request.kind == kind and name in request.key
        return s3_fault(403, "AccessDenied") if is_meant else None

    return fault


@pytest.mark.parametrize(
    "format", [{}, SEVERAL, {"dtype": "bf16"}, {"rename": {"*": "model.*"}, "metadata": {"a": "b"}}]
)
def test_the_objects_have_the_bytes_of_local_files(
    server: ObjectServer, tmp_path: Path, format: dict[str, Any]
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    format = format | {"config": tmp_path, "copied": [tmp_path / "tokenizer.json"]}
    torch_ckpt.save(state(), tmp_path / "local", format=Safetensors(**format))
    save(server, state(), **format)
    local = {path.name: path.read_bytes() for path in (tmp_path / "local").iterdir()}
    assert contents(server) == local
    assert not server.uploads


def loaded(server: ObjectServer, given: StateDict) -> StateDict:
    """Loads the model by its URL. given: a state with the same names and shapes."""
    state = {name: torch.zeros_like(value) for name, value in given.items()}
    torch_ckpt.load(state, URL, options=ReadOptions(storage_options=server.options))
    return state


@pytest.mark.parametrize("format", [{}, SEVERAL])
def test_a_model_is_loaded_and_verified_by_its_url(
    server: ObjectServer, format: dict[str, Any]
) -> None:
    for fill in (1.0, 2.0):
        save(server, state(fill), **format)
        assert_equal(loaded(server, state(fill)), state(fill))
        assert torch_ckpt.verify(URL, storage_options=server.options).ok


def test_a_state_without_tensors_is_stored_as_a_local_file(
    server: ObjectServer, tmp_path: Path
) -> None:
    torch_ckpt.save({}, tmp_path / "local", format="safetensors")
    save(server, {})
    local = {path.name: path.read_bytes() for path in (tmp_path / "local").iterdir()}
    assert contents(server) == local


def test_a_background_save_stores_the_snapshot(server: ObjectServer, tmp_path: Path) -> None:
    given = state()
    options = WriteOptions(storage_options=server.options)
    handle = torch_ckpt.async_save(given, URL, format="safetensors", options=options)
    given["large"].zero_()
    handle.result()
    assert_stored(server, tmp_path / "model", state())


def test_nothing_is_written_to_a_local_disk(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    save(server, state())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("first", [{}, SEVERAL])
@pytest.mark.parametrize("second", [{}, SEVERAL])
def test_a_save_replaces_a_model(
    server: ObjectServer, tmp_path: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    save(server, state(1.0), **first)
    before = contents(server).keys()
    save(server, state(2.0), **second)
    assert_stored(server, tmp_path / "second", state(2.0))
    assert contents(server).keys() & before <= {INDEX, "torch_ckpt.checksums"}
    save(server, state(3.0), **first)
    assert_stored(server, tmp_path / "third", state(3.0))


@pytest.mark.parametrize("format", [{}, SEVERAL])
def test_the_replaced_model_is_read_until_the_index_is_stored(
    server: ObjectServer, tmp_path: Path, format: dict[str, Any]
) -> None:
    save(server, state(1.0), **format)
    seen: list[dict[str, Stored]] = []

    def keep(request: Request) -> Fault | None:
        if request.kind in ("complete", "put"):
            seen.append(dict(server.objects))
        return None

    server.fault = keep
    save(server, state(2.0), **format)
    # The last request is for the final checksums.
    expected = [1.0] * (len(seen) - 1) + [2.0]
    for fill, server.objects in zip(expected, seen, strict=True):
        assert_stored(server, tmp_path / "model", state(fill))
        shutil.rmtree(tmp_path / "model")


@pytest.mark.parametrize("data", [b"", b"short", b"\xff" * 20, b"\2" + bytes(7) + b"[]"])
def test_a_damaged_model_is_replaced(server: ObjectServer, tmp_path: Path, data: bytes) -> None:
    save(server, state(1.0))
    server.objects["exports/final/model.safetensors"].data = data
    save(server, state(2.0))
    assert_stored(server, tmp_path / "model", state(2.0))


def test_a_model_is_not_replaced_without_overwrite(server: ObjectServer) -> None:
    save(server, state(1.0))
    before = contents(server)
    error = cause(server, state(2.0), overwrite=False)
    assert isinstance(error, FileExistsError)
    assert "pass overwrite=True to replace it" in str(error)
    assert error.filename == URL
    assert contents(server) == before


def test_objects_of_other_programs_are_not_replaced(server: ObjectServer) -> None:
    save(server, state(1.0))
    server.objects["exports/final/notes.txt"] = server.objects["exports/final/model.safetensors"]
    before = contents(server)
    error = cause(server, state(2.0))
    assert isinstance(error, FileExistsError)
    assert error.filename == f"{URL}/notes.txt"
    assert contents(server) == before


def test_a_config_with_other_contents_is_not_replaced(server: ObjectServer, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"vocab_size": 1}')
    save(server, state(1.0), config=config)
    save(server, state(2.0), config=config)
    config.write_text('{"vocab_size": 10}')
    before = contents(server)
    error = cause(server, state(3.0), config=config)
    assert isinstance(error, CheckpointError)
    assert f"{URL}/config.json has other contents" in str(error)
    assert contents(server) == before


@pytest.mark.parametrize(
    ("kind", "name"),
    [("part", "model"), ("put", "checksums"), ("put", "index.json"), ("complete", "model")],
)
def test_a_failed_save_leaves_the_model_and_no_other_object(
    server: ObjectServer, tmp_path: Path, kind: str, name: str
) -> None:
    save(server, state(1.0), **SEVERAL)
    before = contents(server)
    server.fault = deny(kind, name)
    error = cause(server, state(2.0), **SEVERAL)
    assert "AccessDenied" in str(error)
    server.fault = lambda request: None
    assert contents(server) == before
    assert not server.uploads
    assert_stored(server, tmp_path / "model", state(1.0))


@pytest.mark.parametrize(
    ("kind", "name"),
    [("put", CLAIM), ("part", "model"), ("put", "checksums"), ("put", "index.json")],
)
def test_a_failed_first_save_leaves_no_object(server: ObjectServer, kind: str, name: str) -> None:
    server.fault = deny(kind, name)
    error = cause(server, state(), **SEVERAL)
    assert "AccessDenied" in str(error)
    assert contents(server) == {}
    assert not server.uploads


def test_a_lost_answer_to_a_request_is_no_failure(server: ObjectServer, tmp_path: Path) -> None:
    reset = {"put", "part", "complete", "head", "get", "list"}

    def once(request: Request) -> Fault | None:
        if request.kind in reset:
            reset.discard(request.kind)
            return Fault("reset", after=True)
        return None

    server.fault = once
    save(server, state())
    save(server, state(2.0))
    assert not reset
    assert_stored(server, tmp_path / "model", state(2.0))


def replace_meanwhile(server: ObjectServer, objects: dict[str, Stored]) -> None:
    """Makes other objects appear when the first upload of a save is complete."""
    replaced: list[Request] = []

    def fault(request: Request) -> Fault | None:
        if request.kind == "complete" and not replaced:
            replaced.append(request)
            server.objects |= objects
        return None

    server.fault = fault


@pytest.mark.parametrize("format", [{}, SEVERAL])
def test_a_save_is_not_committed_if_another_one_was_committed_meanwhile(
    server: ObjectServer, tmp_path: Path, format: dict[str, Any]
) -> None:
    save(server, state(1.0), **format)
    before = dict(server.objects)
    save(server, state(2.0), **SEVERAL)
    of_other, server.objects = server.objects, before
    replace_meanwhile(server, of_other)
    error = cause(server, state(3.0), **format)
    assert isinstance(error, NotCommitted)
    assert "another save" in str(error)
    for name in before.keys() - of_other.keys():  # the other save has deleted them
        del server.objects[name]
    assert_stored(server, tmp_path / "model", state(2.0))


def test_the_first_of_two_saves_is_not_committed_after_the_other(
    server: ObjectServer, tmp_path: Path
) -> None:
    save(server, {"a": torch.ones(1)})
    save(server, state(2.0), **SEVERAL)  # has names with a tag
    of_other, server.objects = server.objects, {}
    replace_meanwhile(server, of_other)
    error = cause(server, state(1.0), **SEVERAL)
    assert isinstance(error, NotCommitted)
    assert_stored(server, tmp_path / "model", state(2.0))


def test_leftovers_of_a_killed_save_are_deleted_by_the_next_one(
    server: ObjectServer, tmp_path: Path
) -> None:
    save(server, state(1.0), **SEVERAL)
    stored = server.objects["exports/final/torch_ckpt.checksums"]
    server.objects[f"exports/final/{CLAIM}"] = stored
    del server.objects[f"exports/final/{INDEX}"]
    save(server, state(2.0))
    names = contents(server).keys()
    assert len(names) == 3
    assert_stored(server, tmp_path / "model", state(2.0))


def small(fill: float) -> StateDict:
    return {"a": torch.full((40,), fill), "b": torch.full((50, 20), fill)}


def values_seen(server: ObjectServer) -> list[set[float] | None]:
    """Returns the values of the model that readers get which prefer the index, as torch_ckpt does,
    and of the model for those that prefer a single file, as transformers does. None: no model."""
    found, seen = contents(server), list[set[float] | None]()
    for preferred in ((INDEX, "model.safetensors"), ("model.safetensors", INDEX)):
        name = next((name for name in preferred if name in found), None)
        if name is None:
            seen.append(None)
            continue
        index = json.loads(found[INDEX])["weight_map"] if name == INDEX else {"a": name, "b": name}
        assert index.keys() == {"a", "b"}
        tensors = [safetensors.torch.load(found[file])[key] for key, file in index.items()]
        seen.append({value for tensor in tensors for value in tensor.flatten().tolist()})
    return seen


@pytest.mark.parametrize("first", [None, {}, SEVERAL])
@pytest.mark.parametrize("second", [{}, SEVERAL])
def test_a_save_that_ends_at_any_request_leaves_one_of_the_models(
    server: ObjectServer, first: dict[str, Any] | None, second: dict[str, Any]
) -> None:
    if first is not None:
        save(server, small(1.0), **first)
    before, is_committed, at = dict(server.objects), False, 0
    while not is_committed:
        server.objects = dict(before)
        left = iter(range(at))
        # Nothing that a killed process would do later takes place.
        server.fault = lambda _, left=left: None if next(left, None) is not None else DENIED
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                save(server, small(2.0), **second)
            is_committed = next(left, None) is not None
        except dcp.CheckpointException:
            pass
        server.fault = lambda request: None
        allowed = [{2.0}, None if first is None else {1.0}]
        assert all(values in allowed for values in values_seen(server))
        if None not in values_seen(server):
            state = loaded(server, small(0.0)).values()
            assert {value for tensor in state for value in tensor.flatten().tolist()} in allowed
        save(server, small(3.0), **second)
        assert values_seen(server) == [{3.0}, {3.0}]
        assert len(contents(server)) <= 4
        at += 1
    assert at > 8


@pytest.mark.parametrize("fault", [s3_fault(503, "SlowDown"), Fault("reset", after=True)])
def test_each_request_of_a_save_may_fail_once(server: ObjectServer, fault: Fault) -> None:
    save(server, small(1.0), **SEVERAL)
    before, is_done, at = dict(server.objects), False, 0
    while not is_done:
        server.objects = dict(before)
        numbers = iter(range(at + 1))
        server.fault = lambda _, numbers=numbers, at=at: fault if next(numbers, -1) == at else None
        save(server, small(2.0), **SEVERAL)
        is_done = next(numbers, None) is not None
        assert values_seen(server) == [{2.0}, {2.0}]
        assert len(contents(server)) == 4
        at += 1
    assert at > 8
