"""Checkpoints beneath URLs: saves, loads, commits and failures."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_ckpt
from tests.object_server import BUCKET, Fault, ObjectServer, Request, s3_fault
from tests.support import cause_of
from torch_ckpt import ReadOptions, WriteOptions
from torch_ckpt.errors import NotCommitted

MIB = 1 << 20
URL = f"s3://{BUCKET}/run/100"
METADATA = "run/100/.metadata"


@pytest.fixture
def server() -> Iterator[ObjectServer]:
    pytest.importorskip("obstore")
    with ObjectServer().running() as running:
        yield running


def state(fill: float = 1.0) -> dict[str, Any]:
    """A state with tensors of several parts, small tensors and objects."""
    large = torch.arange(5 * MIB, dtype=torch.float64) * fill
    small = {f"t{i}": torch.full((i,), fill) for i in range(20)}
    return {"large": large, "small": small, "step": int(fill), "names": {"a": [1, None]}}


def empty() -> dict[str, Any]:
    small = {f"t{i}": torch.zeros(i) for i in range(20)}
    large = torch.zeros(5 * MIB, dtype=torch.float64)
    return {"large": large, "small": small, "step": 0, "names": {"a": [0, 0]}}


def save(server: ObjectServer, given: dict[str, Any], **options: Any) -> torch_ckpt.Checkpoint:
    settings = WriteOptions(storage_options=server.options, **options)
    return torch_ckpt.save(given, URL, options=settings)


def load(server: ObjectServer) -> dict[str, Any]:
    loaded = empty()
    torch_ckpt.load(loaded, URL, options=ReadOptions(storage_options=server.options))
    return loaded


def assert_equal(loaded: dict[str, Any], saved: dict[str, Any]) -> None:
    torch.testing.assert_close(loaded, saved, rtol=0, atol=0)


def refusal(work: Callable[[], Any]) -> BaseException:
    with pytest.raises(dcp.CheckpointException) as caught:
        work()
    return cause_of(caught.value)


def test_a_state_is_loaded_as_it_was_saved(server: ObjectServer) -> None:
    save(server, state())
    assert_equal(load(server), state())


def test_a_background_save_stores_the_snapshot(server: ObjectServer) -> None:
    given = state()
    handle = torch_ckpt.async_save(given, URL, options=WriteOptions(storage_options=server.options))
    given["large"].zero_()
    handle.result()
    assert_equal(load(server), state())


def test_a_save_replaces_the_earlier_checkpoint_and_deletes_its_objects(
    server: ObjectServer,
) -> None:
    save(server, state(1.0))
    earlier = set(server.objects)
    save(server, state(2.0))
    assert_equal(load(server), state(2.0))
    assert earlier & set(server.objects) == {METADATA}


def test_a_save_without_overwrite_refuses_to_replace_a_checkpoint(server: ObjectServer) -> None:
    save(server, state(1.0))
    error = refusal(lambda: save(server, state(2.0), overwrite=False))
    assert "Checkpoint already exists" in str(error)
    assert_equal(load(server), state(1.0))


def is_part(request: Request) -> bool:
    return request.kind in ("part", "put") and request.key.endswith(".distcp")


def test_a_failed_save_leaves_the_earlier_checkpoint_and_no_other_object(
    server: ObjectServer,
) -> None:
    save(server, state(1.0))
    before = set(server.objects)
    server.fault = lambda request: s3_fault(403, "AccessDenied") if is_part(request) else None
    error = refusal(lambda: save(server, state(2.0)))
    assert isinstance(error, PermissionError)
    assert "AccessDenied" in str(error)
    assert URL in str(error.filename)
    server.fault = lambda request: None
    assert set(server.objects) == before
    assert not server.uploads
    assert_equal(load(server), state(1.0))


def test_a_failed_upload_ends_a_save_although_the_server_does_not_answer_other_uploads(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_ckpt.stores.folder.CLEANUP_SECONDS", 0.5)
    answered: list[Request] = []

    def refuse_first(request: Request) -> Fault | None:
        if not is_part(request):
            return None
        answered.append(request)
        return s3_fault(403, "AccessDenied") if len(answered) == 1 else Fault("stall")

    server.fault = refuse_first
    error = refusal(lambda: save(server, state()))
    assert isinstance(error, PermissionError)
    assert METADATA not in server.objects


def test_a_save_is_not_committed_if_another_one_was_committed_meanwhile(
    server: ObjectServer,
) -> None:
    save(server, state(1.0))
    before = dict(server.objects)
    of_other = replace(server.objects[METADATA], etag='"other"')

    def commit_meanwhile(request: Request) -> Fault | None:
        if is_part(request):
            server.objects[METADATA] = of_other
        return None

    server.fault = commit_meanwhile
    error = refusal(lambda: save(server, state(2.0)))
    assert isinstance(error, NotCommitted)
    assert "another save" in str(error)
    assert server.objects == before | {METADATA: of_other}


def test_a_lost_answer_to_a_request_is_no_failure(server: ObjectServer) -> None:
    reset = {"put", "part", "create", "complete", "head", "get"}

    def once(request: Request) -> Fault | None:
        if request.kind in reset:
            reset.discard(request.kind)
            return Fault("reset", after=True)
        return None

    server.fault = once
    save(server, state(), thread_count=1)
    assert not reset - {"create"}
    assert_equal(load(server), state())


def test_a_missing_checkpoint_is_named(server: ObjectServer) -> None:
    error = refusal(lambda: load(server))
    assert isinstance(error, FileNotFoundError)
    assert "no committed checkpoint" in str(error)
    assert error.filename == URL


def test_damage_is_named_with_the_tensor(server: ObjectServer) -> None:
    save(server, state(), thread_count=1)
    [name] = [name for name in server.objects if name.endswith(".distcp")]
    data = bytearray(server.objects[name].data)
    data[10 * MIB] ^= 1
    server.objects[name].data = bytes(data)
    error = refusal(lambda: load(server))
    assert isinstance(error, torch_ckpt.Corrupt)
    assert "large" in str(error)


def test_an_object_that_is_replaced_during_a_load_is_named(server: ObjectServer) -> None:
    save(server, state(), thread_count=1)
    [name] = [name for name in server.objects if name.endswith(".distcp")]

    def replace(request: Request) -> Fault | None:
        if request.kind == "get" and request.key == name:
            server.objects[name].etag = "another"
        return None

    server.fault = replace
    error = refusal(lambda: load(server))
    assert isinstance(error, OSError)
    assert "replaced" in str(error)
    assert error.filename == f"s3://{BUCKET}/{name}"


def test_a_budget_below_the_smallest_part_is_refused(server: ObjectServer) -> None:
    error = refusal(lambda: save(server, state(), max_host_bytes=MIB))
    assert isinstance(error, ValueError)
    assert "max_host_bytes" in str(error)
    assert not server.objects


def test_nothing_is_written_to_a_local_disk(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    save(server, state())
    load(server)
    assert list(tmp_path.iterdir()) == []


def test_options_with_credentials_do_not_show_or_pickle_them(server: ObjectServer) -> None:
    for options in (
        WriteOptions(storage_options=server.options),
        ReadOptions(storage_options=server.options),
    ):
        assert server.options["secret"] not in repr(options)
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(options)


def test_dcp_saves_and_loads_by_the_writer_and_reader(server: ObjectServer) -> None:
    writer = torch_ckpt.FileSystemWriter(URL, storage_options=server.options)
    dcp.save(state(), storage_writer=writer, no_dist=True)
    loaded = empty()
    reader = torch_ckpt.FileSystemReader(URL, storage_options=server.options)
    dcp.load(loaded, storage_reader=reader, no_dist=True)
    assert_equal(loaded, state())


def test_a_planner_saves_and_loads(server: ObjectServer) -> None:
    torch_ckpt.save(
        state(),
        URL,
        planner=dcp.DefaultSavePlanner(),
        options=WriteOptions(storage_options=server.options),
    )
    loaded = empty()
    torch_ckpt.load(
        loaded,
        URL,
        planner=dcp.DefaultLoadPlanner(),
        options=ReadOptions(storage_options=server.options),
    )
    assert_equal(loaded, state())


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_file_systems_of_fsspec_hold_checkpoints(scheme: str, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    url = f"{scheme}://{tmp_path}/c"
    torch_ckpt.save(state(1.0), url)
    torch_ckpt.save(state(2.0), url)
    loaded = empty()
    torch_ckpt.load(loaded, url)
    assert_equal(loaded, state(2.0))


def test_stock_torch_reads_a_checkpoint_beneath_a_url(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("torch.distributed.checkpoint._fsspec_filesystem")
    url = f"memory://{tmp_path}/c"
    saved = state()
    torch_ckpt.save(saved, url)
    loaded = empty()
    dcp.load(loaded, storage_reader=fsspec.FsspecReader(url), no_dist=True)
    assert_equal(loaded, saved)


def test_a_checkpoint_that_stock_torch_has_saved_beneath_a_url_is_read(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("torch.distributed.checkpoint._fsspec_filesystem")
    url = f"memory://{tmp_path}/c"
    saved = state()
    dcp.save(saved, storage_writer=fsspec.FsspecWriter(url), no_dist=True)
    loaded = empty()
    torch_ckpt.load(loaded, url)
    assert_equal(loaded, saved)
