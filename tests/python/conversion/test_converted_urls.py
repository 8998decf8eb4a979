"""Conversions from and to URLs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ckpt
from tests.object_checkpoints import MODEL, TENSORS, URL, key_of, store, upload
from tests.object_server import Fault, ObjectServer, Request
from tests.support import save
from torch_ckpt import CheckpointError, Corrupt, ReadOptions
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


@pytest.mark.parametrize("target", ["m.safetensors", "copy"])
def test_a_conversion_replaces_an_existing_target_only_with_overwrite(
    tensors: dict[str, torch.Tensor], server: ObjectServer, target: str
) -> None:
    url, options = f"{MODEL}/{target}", server.options
    rename: dict[str, dict[str, str]] = {"rename": {"a": "z"}}
    torch_ckpt.convert(URL, url, **rename, storage_options=options)
    before = dict(server.objects)
    with pytest.raises(FileExistsError, match="pass overwrite=True"):
        torch_ckpt.convert(URL, url, **rename, storage_options=options)
    assert server.objects == before
    torch_ckpt.convert(URL, url, rename={"a": "y"}, overwrite=True, storage_options=options)
    assert "y" in opened(server, url).names


@pytest.mark.parametrize("target", ["m.safetensors", "copy"])
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
        )
    assert set(server.objects) == before
    assert not server.uploads


@pytest.mark.parametrize(("target", "options"), [("m.pt", {}), ("model", {"max_shard_size": 1000})])
def test_a_target_that_cannot_be_a_url_is_refused_at_once(
    server: ObjectServer, target: str, options: dict[str, Any]
) -> None:
    with pytest.raises(CheckpointError, match="Convert to a local path"):
        torch_ckpt.convert(URL, f"{MODEL}/{target}", **options, storage_options=server.options)
    assert not server.log


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
    torch_ckpt.convert(URL, f"{MODEL}/m.safetensors", dtype="bf16", storage_options=options)
    torch_ckpt.convert(f"{MODEL}/m.safetensors", f"{MODEL}/copy", storage_options=options)
    assert list(empty.iterdir()) == []


def test_file_systems_of_fsspec_are_converted(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    url = f"memory://{tmp_path}/c"
    torch_ckpt.save(TENSORS, url, no_dist=True)
    torch_ckpt.convert(url, f"{url}.safetensors")
    torch_ckpt.convert(f"{url}.safetensors", f"{url}/copy")
    assert diff(url, f"{url}/copy").equal
