"""Checkpoints beneath URLs: verified, listed, shown and compared."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import torch_ckpt
from tests.object_checkpoints import MODEL, TENSORS, URL, key_of, store, upload
from tests.object_server import BUCKET, Fault, ObjectServer, Request, s3_fault
from tests.support import save
from tests.verified_checkpoints import STATE
from torch_ckpt import ReadOptions, Unsafe, WriteOptions
from torch_ckpt.inspection.diff import diff
from torch_ckpt.inspection.listing import examine
from torch_ckpt.inspection.show import show
from torch_ckpt.stores.object_store import ObjectStore


@pytest.fixture
def server() -> Iterator[ObjectServer]:
    pytest.importorskip("obstore")
    with ObjectServer().running() as running:
        yield running


@pytest.fixture
def saved(tmp_path: Path, server: ObjectServer) -> Path:
    """Saves a checkpoint in a directory, and copies it to the URL."""
    save(STATE, tmp_path / "c")
    upload(server, tmp_path / "c")
    return tmp_path / "c"


def verify(server: ObjectServer, url: str = URL, **options: Any) -> torch_ckpt.VerifyReport:
    return torch_ckpt.verify(url, storage_options=server.options, **options)


def opened(server: ObjectServer, url: str = URL) -> torch_ckpt.Checkpoint:
    return torch_ckpt.open(url, ReadOptions(storage_options=server.options))


# --- reports -------------------------------------------------------------------------------------


def test_the_reports_for_a_url_are_those_for_the_directory(
    saved: Path, server: ObjectServer
) -> None:
    options = server.options
    report, expected = verify(server), torch_ckpt.verify(saved)
    assert report.ok
    assert (report.records, report.bytes) == (expected.records, expected.bytes)
    assert [*show(URL, storage_options=options).lines()] == [*show(saved).lines()]
    listing, of_directory = examine(URL, storage_options=options), examine(saved)
    assert (listing.items, listing.files) == (of_directory.items, of_directory.files)
    assert listing.disk_bytes == of_directory.disk_bytes
    assert diff(URL, saved, storage_options=options).equal


def test_an_open_checkpoint_reads_values_and_boxes(saved: Path, server: ObjectServer) -> None:
    with opened(server) as checkpoint:
        assert set(checkpoint.names) == set(STATE)
        assert torch.equal(checkpoint.read("transposed"), STATE["transposed"])
        assert torch.equal(checkpoint.read("blocks", ((7, 1), (3, 9))), STATE["blocks"][7:10, 1:10])
        assert checkpoint.read("note") == STATE["note"]
        assert len(checkpoint.metadata().state_dict_metadata) == len(STATE)


def test_the_checkpoint_that_a_save_returns_is_read_with_the_options_of_the_save(
    server: ObjectServer,
) -> None:
    options = WriteOptions(storage_options=server.options)
    checkpoint = torch_ckpt.save({"t": torch.ones(3)}, URL, options=options)
    assert torch.equal(checkpoint.read("t"), torch.ones(3))


def test_a_url_is_listed_only_if_no_object_has_the_name(saved: Path, server: ObjectServer) -> None:
    with opened(server) as checkpoint:
        checkpoint.read("note")
    assert "list" not in server.kinds()


def test_the_sizes_of_objects_are_requested_at_once(tmp_path: Path, server: ObjectServer) -> None:
    state = {name: torch.zeros(1000) for name in "abcd"}
    torch_ckpt.save(state, tmp_path / "c", options=WriteOptions(single_file_per_rank=False))
    upload(server, tmp_path / "c")
    together = threading.Barrier(2)

    def meet(request: Request) -> None:
        if request.kind == "head" and request.key.endswith(".distcp"):
            together.wait(30)

    server.fault = meet
    assert verify(server).ok


# --- damage --------------------------------------------------------------------------------------


def test_damage_of_an_object_is_found_where_it_is(saved: Path, server: ObjectServer) -> None:
    stored = server.objects[key_of(server)]
    at = len(stored.data) // 2
    changed = bytearray(stored.data)
    changed[at] ^= 1
    stored.data = bytes(changed)
    (damage,) = verify(server).damaged
    assert damage.offset is not None
    assert damage.offset <= at < damage.offset + damage.bytes
    assert [name for name, _ in show(URL, storage_options=server.options).damaged] == [damage.name]


def test_a_truncated_object_is_damaged(saved: Path, server: ObjectServer) -> None:
    stored = server.objects[key_of(server)]
    stored.data = stored.data[:-10]
    assert "the file ends at byte" in verify(server).damaged[0].what
    (fault,) = examine(URL, storage_options=server.options).faults
    assert fault.endswith("(too short)")


def test_a_missing_object_is_named_with_the_values_in_it(saved: Path, server: ObjectServer) -> None:
    name = Path(key_of(server)).name
    del server.objects[key_of(server)]
    report = verify(server)
    assert [file for file, _names in report.missing] == [name]
    assert f"{name} (missing)" in examine(URL, storage_options=server.options).faults
    assert show(URL, storage_options=server.options).damaged


def test_objects_that_the_metadata_does_not_name_are_listed(
    saved: Path, server: ObjectServer
) -> None:
    store(server, "__9_0.distcp", b"left behind")
    store(server, "beneath/another", b"")
    assert verify(server).unreferenced == ["__9_0.distcp"]
    listing = examine(URL, storage_options=server.options)
    assert [file.name for file in listing.files if file.state == "unreferenced"] == ["__9_0.distcp"]


def replaced_at_a_read(server: ObjectServer) -> Callable[[Request], Fault | None]:
    """Returns a fault that replaces a data object when its second range is read."""
    reads: list[str] = []

    def replace(request: Request) -> Fault | None:
        if request.kind == "get" and request.key.endswith(".distcp"):
            reads.append(request.key)
            if len(reads) == 2:
                server.objects[request.key].etag = '"another"'
        return None

    return replace


def test_an_object_that_is_replaced_during_a_verification_is_named(
    saved: Path, server: ObjectServer
) -> None:
    server.fault = replaced_at_a_read(server)
    with pytest.raises(OSError, match="replaced") as caught:
        verify(server, thread_count=1)
    assert caught.value.filename == f"s3://{BUCKET}/{key_of(server)}"


def test_an_object_that_is_replaced_between_two_reads_is_named(
    saved: Path, server: ObjectServer
) -> None:
    with opened(server) as checkpoint:
        assert checkpoint.read("nothing") is None
        key = next(f"run/100/{record.file}" for record in checkpoint.records("nothing"))
        server.objects[key].etag = '"another"'
        with pytest.raises(OSError, match="replaced"):
            checkpoint.read("nothing")


# --- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["head", "get"])
def test_a_refused_request_ends_a_verification(
    saved: Path, server: ObjectServer, kind: str
) -> None:
    refused: list[str] = []

    def refuse(request: Request) -> Fault | None:
        if request.kind == kind and request.key.endswith(".distcp"):
            refused.append(request.key)
            return s3_fault(403, "AccessDenied")
        return None

    server.fault = refuse
    with pytest.raises(PermissionError, match="403") as caught:
        verify(server, thread_count=1)
    assert caught.value.filename == f"s3://{BUCKET}/{refused[0]}"
    assert len(refused) == 1


def test_a_server_that_does_not_answer_ends_a_verification(
    saved: Path, server: ObjectServer
) -> None:
    server.fault = lambda request: Fault("stall") if request.key.endswith(".distcp") else None
    limits = {"connect_timeout": 0.3, "read_timeout": 0.3}
    options = server.options | {"retry_seconds": 0.3, "config_kwargs": limits}
    with pytest.raises(TimeoutError) as caught:
        torch_ckpt.verify(URL, storage_options=options)
    assert caught.value.filename.startswith(URL)


def test_ctrl_c_during_a_request_ends_a_verification(
    saved: Path, server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = ObjectStore.head

    def interrupted(self: ObjectStore, name: str) -> Any:
        if name.endswith(".distcp"):
            raise KeyboardInterrupt
        return head(self, name)

    monkeypatch.setattr(ObjectStore, "head", interrupted)
    with pytest.raises(KeyboardInterrupt):
        verify(server)


def test_a_checkpoint_is_read_without_the_permission_to_list(
    saved: Path, server: ObjectServer
) -> None:
    server.fault = lambda request: s3_fault(403, "AccessDenied") if request.kind == "list" else None
    assert verify(server).ok
    assert not examine(URL, storage_options=server.options).faults
    with pytest.raises(PermissionError, match="list failed"):
        opened(server, f"s3://{BUCKET}/run")


def test_nothing_is_written_to_a_local_disk(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    options = server.options
    torch_ckpt.save(STATE, URL, options=WriteOptions(storage_options=options))
    assert verify(server).ok
    show(URL, storage_options=options)
    examine(URL, storage_options=options)
    diff(URL, URL, storage_options=options)
    assert list(tmp_path.iterdir()) == []


# --- safetensors ---------------------------------------------------------------------------------


@pytest.fixture(params=[None, 20_000], ids=["one file", "several files"])
def model(request: pytest.FixtureRequest, tmp_path: Path, server: ObjectServer) -> Path:
    """Saves a model with checksums in a directory, and copies it to the URL."""
    format = torch_ckpt.Safetensors(max_shard_size=request.param or 1 << 30)
    torch_ckpt.save(TENSORS, tmp_path / "model", format=format, no_dist=True)
    upload(server, tmp_path / "model", MODEL)
    return tmp_path / "model"


def test_safetensors_files_beneath_a_url_are_read(model: Path, server: ObjectServer) -> None:
    loaded = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    torch_ckpt.load(loaded, MODEL, options=ReadOptions(storage_options=server.options))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    report = verify(server, MODEL)
    assert report.ok
    assert not report.unverifiable
    with opened(server, MODEL) as checkpoint:
        assert checkpoint.safetensors_metadata == torch_ckpt.open(model).safetensors_metadata


def test_one_safetensors_file_beneath_a_url_is_read(model: Path, server: ObjectServer) -> None:
    file = min(path.name for path in model.glob("*.safetensors"))
    with opened(server, f"{MODEL}/{file}") as checkpoint:
        stored = safetensors.torch.load_file(model / file)
        assert set(checkpoint.names) == set(stored)
        assert all(torch.equal(checkpoint.read(name), stored[name]) for name in stored)
    assert "list" not in server.kinds()


def test_the_files_of_a_model_are_found_on_a_web_server(model: Path, server: ObjectServer) -> None:
    with torch_ckpt.open(f"{server.url}/{BUCKET}/model") as checkpoint:
        assert set(checkpoint.names) == set(TENSORS)
        assert torch.equal(checkpoint.read("c"), TENSORS["c"])


def test_damage_of_a_safetensors_object_is_found(model: Path, server: ObjectServer) -> None:
    stored = server.objects[key_of(server, ".safetensors")]
    stored.data = stored.data[:-4] + b"\1\2\3\4"
    (damage,) = verify(server, MODEL).damaged
    assert damage.name in TENSORS


@pytest.mark.parametrize("name", ["../secret.safetensors", "a?b.safetensors", "s3://x/y", "a//b"])
def test_no_object_outside_the_url_is_requested_for_a_name_in_a_weight_map(
    server: ObjectServer, name: str
) -> None:
    store(server, "secret.safetensors", safetensors.torch.save(TENSORS), f"s3://{BUCKET}")
    weight_map = json.dumps({"weight_map": {"a": name}}).encode()
    store(server, "model.safetensors.index.json", weight_map, MODEL)
    with pytest.raises(Unsafe):
        opened(server, MODEL)
    assert all(request.key.startswith("model/") for request in server.log if request.key)


# --- other file systems --------------------------------------------------------------------------
