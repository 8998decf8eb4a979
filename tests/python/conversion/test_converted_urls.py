"""Conversions from and to URLs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ckpt
from tests.conversions import STATE
from tests.object_checkpoints import MODEL, TENSORS, URL, key_of, store, upload
from tests.object_server import BUCKET, MIB, Fault, ObjectServer, Request, s3_fault
from tests.support import save
from torch_ckpt import CheckpointError, Corrupt, ReadOptions
from torch_ckpt.errors import NotCommitted
from torch_ckpt.inspection.diff import diff


@pytest.fixture
def server() -> Iterator[ObjectServer]:
    pytest.importorskip("obstore")
    with ObjectServer().running() as running:
        yield running


def opened(server: ObjectServer, url: str = URL) -> torch_ckpt.Checkpoint:
    return torch_ckpt.open(url, ReadOptions(storage_options=server.options))


@pytest.fixture
def tensors(tmp_path: Path, server: ObjectServer) -> dict[str, torch.Tensor]:
    save(TENSORS, tmp_path / "t")
    upload(server, tmp_path / "t")
    return TENSORS


@pytest.mark.parametrize("target", ["model.safetensors", "copy"])
def test_a_url_is_converted_to_a_url(
    tensors: dict[str, torch.Tensor], server: ObjectServer, tmp_path: Path, target: str
) -> None:
    options = server.options
    # A limit of one tensor needs several waves.
    first = torch_ckpt.convert(
        URL, f"{MODEL}/model.safetensors", max_host_bytes=8000, storage_options=options
    )
    assert first.files == [f"{MODEL}/model.safetensors"]
    torch_ckpt.convert(
        f"{MODEL}/model.safetensors",
        f"{MODEL}/of/{target}",
        rename={"a": "z"},
        max_host_bytes=8000,
        storage_options=options,
    )
    torch_ckpt.convert(URL, tmp_path / "z", rename={"a": "z"}, storage_options=options)
    assert diff(f"{MODEL}/of/{target}", tmp_path / "z", storage_options=options).equal
    assert torch_ckpt.verify(f"{MODEL}/of/{target}", storage_options=options).ok


def test_a_safetensors_object_has_the_bytes_of_the_file(
    tensors: dict[str, torch.Tensor], server: ObjectServer, tmp_path: Path
) -> None:
    for target in (f"{MODEL}/m.safetensors", tmp_path / "m.safetensors"):
        torch_ckpt.convert(URL, target, storage_options=server.options)
    stored = server.objects["model/m.safetensors"].data
    assert stored == (tmp_path / "m.safetensors").read_bytes()


def test_a_torch_save_file_beneath_a_url_is_converted(server: ObjectServer, tmp_path: Path) -> None:
    torch.save({"model": TENSORS, "step": 3}, tmp_path / "m.pt")
    store(server, "m.pt", (tmp_path / "m.pt").read_bytes(), MODEL)
    torch_ckpt.convert(f"{MODEL}/m.pt", URL, storage_options=server.options)
    with opened(server) as checkpoint:
        assert torch.equal(checkpoint.read("model.b"), TENSORS["b"])
        assert checkpoint.read("step") == 3


def test_an_object_that_is_too_short_for_its_format_is_refused(server: ObjectServer) -> None:
    store(server, "m.pt", b"PK\3\4 short", MODEL)
    with pytest.raises(Corrupt, match=r"m\.pt is a damaged archive"):
        torch_ckpt.convert(f"{MODEL}/m.pt", URL, storage_options=server.options)


def test_a_torch_save_file_that_is_replaced_during_a_conversion_is_named(
    server: ObjectServer, tmp_path: Path
) -> None:
    torch.save({name: tensor.repeat(20, 20) for name, tensor in TENSORS.items()}, tmp_path / "m.pt")
    store(server, "m.pt", (tmp_path / "m.pt").read_bytes(), MODEL)

    def replace(request: Request) -> Fault | None:
        if request.kind == "put":
            server.objects["model/m.pt"].etag = '"another"'
        return None

    server.fault = replace
    with pytest.raises(OSError, match="replaced") as caught:
        torch_ckpt.convert(
            f"{MODEL}/m.pt", URL, max_host_bytes=4_000_000, storage_options=server.options
        )
    assert caught.value.filename == f"{MODEL}/m.pt"


#: Names of targets, and the options that choose the format.
TARGETS: dict[str, dict[str, Any]] = {
    "m.safetensors": {},
    "m.pt": {},
    "copy": {},
    "model": {"max_shard_size": 20_000},
    "single": {"max_shard_size": 10**6},
}


@pytest.mark.parametrize("target", TARGETS)
def test_a_conversion_replaces_an_existing_target_only_with_overwrite(
    tensors: dict[str, torch.Tensor], server: ObjectServer, tmp_path: Path, target: str
) -> None:
    url, options, format = f"{MODEL}/{target}", server.options, TARGETS[target]
    torch_ckpt.convert(URL, url, rename={"a": "z"}, storage_options=options, **format)
    before = dict(server.objects)
    with pytest.raises(FileExistsError, match="pass overwrite=True"):
        torch_ckpt.convert(URL, url, rename={"a": "z"}, storage_options=options, **format)
    assert server.objects == before
    overwrite: dict[str, Any] = {"overwrite": True, "storage_options": options, **format}
    report = torch_ckpt.convert(URL, url, rename={"a": "y"}, **overwrite)
    torch_ckpt.convert(url, tmp_path / "copy", rename={"y": "a"}, storage_options=options)
    assert diff(tmp_path / "copy", tmp_path / "t").equal
    keys = {key for key in server.objects if key.startswith(f"model/{target}")}
    if "copy" not in target:
        assert keys == {file.removeprefix(f"s3://{BUCKET}/") for file in report.files}


@pytest.mark.parametrize("target", TARGETS)
def test_a_failed_conversion_leaves_no_object(
    tensors: dict[str, torch.Tensor], server: ObjectServer, target: str
) -> None:
    stored = server.objects[key_of(server)]
    stored.data = stored.data[:-3000] + bytes(3000)
    before = set(server.objects)
    with pytest.raises(Corrupt):
        torch_ckpt.convert(
            URL,
            f"{MODEL}/{target}",
            rename={"a": "z"},
            max_host_bytes=8000,
            storage_options=server.options,
            **TARGETS[target],
        )
    assert set(server.objects) == before
    assert not server.uploads


@pytest.mark.parametrize(
    ("target", "denied"), [("m.pt", "m.pt"), ("model", "00002-of"), ("model", "index.json")]
)
def test_a_denied_upload_leaves_no_object(
    tensors: dict[str, torch.Tensor], server: ObjectServer, target: str, denied: str
) -> None:
    before = set(server.objects)

    def deny(request: Request) -> Fault | None:
        is_meant = request.kind in ("put", "create") and denied in request.key
        return s3_fault(403, "AccessDenied") if is_meant else None

    server.fault = deny
    with pytest.raises((OSError, NotCommitted), match=denied):
        torch_ckpt.convert(
            URL, f"{MODEL}/{target}", storage_options=server.options, **TARGETS[target]
        )
    assert set(server.objects) == before


def test_a_failed_conversion_keeps_the_model_that_it_replaces(
    tensors: dict[str, torch.Tensor], server: ObjectServer
) -> None:
    options: dict[str, Any] = {"storage_options": server.options, **TARGETS["model"]}
    torch_ckpt.convert(URL, f"{MODEL}/model", **options)
    before = {key: stored.data for key, stored in server.objects.items()}
    stored = server.objects[key_of(server)]
    sound, stored.data = stored.data, stored.data[:-3000] + bytes(3000)
    with pytest.raises(Corrupt):
        torch_ckpt.convert(URL, f"{MODEL}/model", overwrite=True, max_host_bytes=8000, **options)
    stored.data = sound
    assert {key: stored.data for key, stored in server.objects.items()} == before


def test_large_tensors_are_uploaded_in_parts(server: ObjectServer, tmp_path: Path) -> None:
    # Parts have 16 MiB.
    large = torch.arange(9 << 20, dtype=torch.int16)
    torch.save({"large": large, "object": (large[:MIB],), "small": TENSORS["a"]}, tmp_path / "a.pt")
    torch_ckpt.convert(tmp_path / "a.pt", tmp_path / "ckpt")
    formats: dict[str, dict[str, Any]] = {
        "m.pt": {},
        "model": {"max_shard_size": MIB, "tensors_only": True},
    }
    source, options = tmp_path / "ckpt", server.options
    for target, format in formats.items():
        report = torch_ckpt.convert(source, f"{MODEL}/{target}", storage_options=options, **format)
        local = torch_ckpt.convert(source, tmp_path / target, **format)
        for remote_file, local_file in zip(report.files, local.files, strict=True):
            stored = server.objects[remote_file.removeprefix(f"s3://{BUCKET}/")]
            assert stored.data == Path(local_file).read_bytes(), remote_file
    assert any(request.kind == "part" for request in server.log)


def test_a_url_is_not_converted_to_itself(server: ObjectServer) -> None:
    with pytest.raises(CheckpointError, match="source and target are the same"):
        torch_ckpt.convert(URL, URL, storage_options=server.options)


def test_nothing_is_written_to_a_local_disk(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(TENSORS, tmp_path / "t")
    upload(server, tmp_path / "t")
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    monkeypatch.setenv("TMPDIR", str(empty))
    options = server.options
    for target, format in TARGETS.items():
        url = f"{MODEL}/{target}"
        torch_ckpt.convert(URL, url, dtype="bf16", storage_options=options, **format)
    assert list(empty.iterdir()) == []


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("m.pt", {}),
        ("m.safetensors", {"tensors_only": True}),
        ("several", {"tensors_only": True, "max_shard_size": 100}),
        ("one", {"tensors_only": True, "max_shard_size": 10**9}),
        ("with config", {"tensors_only": True, "config": "config.json", "dtype": "bf16"}),
    ],
)
def test_the_objects_have_the_bytes_of_a_local_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, options: dict[str, Any]
) -> None:
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text('{"model_type": "x"}')
    # A record of more than 1 MiB is not copied.
    large = {"large": torch.arange(5 << 18, dtype=torch.int32), "empty": torch.empty(0, 3)}
    save(STATE | large | {"object": (torch.ones(5 << 18),)}, tmp_path / "source")
    local = torch_ckpt.convert("source", tmp_path / target, max_host_bytes=500, **options)
    url = f"memory://{tmp_path}/{target}"
    remote = torch_ckpt.convert("source", url, max_host_bytes=500, **options)
    assert remote.files == [f"memory://{file}" for file in local.files]
    objects = fsspec.filesystem("memory")
    for file in local.files:
        assert objects.cat_file(file) == Path(file).read_bytes(), file
    assert set(objects.find(str(tmp_path))) == set(local.files)
    assert (remote.tensors, remote.objects, remote.notes) == (
        local.tensors,
        local.objects,
        local.notes,
    )
