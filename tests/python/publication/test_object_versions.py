"""Versions beneath URLs, on each kind of store."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_ckpt
from tests.object_server import BUCKET, ObjectServer
from tests.support import StateDict, assert_equal, cause_of, save_step
from torch_ckpt import CheckpointManager, Export, ReadOptions, Safetensors, WriteOptions, publish
from torch_ckpt.errors import CheckpointError
from torch_ckpt.publication.publish import Version, async_publish
from torch_ckpt.steps import StepStore, open_steps
from torch_ckpt.stores import ObjectStore, open_store

MARKER = "write_completed"


@dataclass
class Root:
    """An empty root beneath a URL.

    Attributes:
        options: of saves to the root.
    """

    url: str
    options: WriteOptions

    @property
    def steps(self) -> StepStore:
        return open_steps(self.url, storage_options=self.options.storage_options)

    @property
    def store(self) -> ObjectStore:
        return open_store(self.url, self.options.storage_options)

    def publish(self, state: StateDict, version: int | None = None, **options: Any) -> Version:
        return publish(state, self.url, version, options=self.options, **options)

    def objects(self) -> dict[str, bytes]:
        store = self.store
        return {entry.name: store.read(entry.name, 1 << 30)[0] for entry in store.list()}

    def numbers(self) -> list[int]:
        return [info.step for info in self.steps.entries(leftovers=False)]

    def latest(self) -> bytes | None:
        return self.objects().get("latest")


@pytest.fixture(params=["memory", "s3"])
def root(request: pytest.FixtureRequest) -> Iterator[Root]:
    if request.param == "memory":
        yield Root(f"memory://{uuid.uuid4().hex}/policy", WriteOptions())
        return
    pytest.importorskip("obstore")
    with ObjectServer().running() as server:
        yield Root(f"s3://{BUCKET}/policy", WriteOptions(storage_options=server.options))


def model(fill: float = 1.0) -> StateDict:
    return {"weight": torch.full((40, 30), fill), "bias": torch.full((7,), fill)}


def values(root: Root, number: int, path: Path) -> StateDict:
    """Downloads a version, and returns its tensors."""
    path.mkdir()
    prefix = f"{number:010d}/"
    for name, data in root.objects().items():
        if name.startswith(prefix):
            (path / name.removeprefix(prefix)).write_bytes(data)
    assert torch_ckpt.verify(path).ok
    state = {"weight": torch.zeros(40, 30), "bias": torch.zeros(7)}
    torch_ckpt.load(state, path)
    return state


def failure(root: Root, **options: Any) -> BaseException:
    with pytest.raises(dcp.CheckpointException) as caught:
        root.publish(model(), **options)
    return cause_of(caught.value)


def fail_once(monkeypatch: pytest.MonkeyPatch, method: str, name: str) -> None:
    call, failed = getattr(ObjectStore, method), []

    def failing(store: ObjectStore, given: str, *args: Any) -> Any:
        if name in given and not failed:
            failed.append(given)
            raise PermissionError(13, "request failed: denied", store.url_of(given))
        return call(store, given, *args)

    monkeypatch.setattr(ObjectStore, method, failing)


def test_versions_are_numbered_and_latest_names_the_newest(root: Root) -> None:
    first = root.publish(model(1.0))
    assert (first.number, first.path) == (0, f"{root.url}/0000000000")
    second = root.publish(model(2.0), version=20)
    assert (second.number, second.path) == (20, f"{root.url}/0000000020")
    assert root.numbers() == [0, 20]
    assert root.latest() == b"0000000020"


def test_a_version_has_the_objects_of_a_local_version(root: Root, tmp_path: Path) -> None:
    root.publish(model(), version=3)
    publish(model(), tmp_path, version=3)
    local = {path.name: path.read_bytes() for path in (tmp_path / "0000000003").iterdir()}
    stored = {
        name.removeprefix("0000000003/"): data
        for name, data in root.objects().items()
        if name.startswith("0000000003/")
    }
    assert stored.keys() == local.keys()
    assert stored["model.safetensors"] == local["model.safetensors"]


def test_the_values_of_a_version_are_those_of_the_call(root: Root, tmp_path: Path) -> None:
    given = model(5.0)
    handle = async_publish(
        given, root.url, 1, format=Safetensors(max_shard_size=1000), options=root.options
    )
    given["weight"].zero_()
    handle.result()
    assert_equal(values(root, 1, tmp_path / "model"), model(5.0))


def test_the_newest_version_is_loaded_by_the_url_of_the_root(root: Root) -> None:
    for fill in (1.0, 2.0):
        root.publish(model(fill))
    options = ReadOptions(storage_options=root.options.storage_options)
    for path, fill in ((root.url, 2.0), (f"{root.url}/0", 1.0)):
        state = model(0.0)
        torch_ckpt.load(state, path, options=options)
        assert_equal(state, model(fill))


def test_a_version_that_is_not_newer_is_refused(root: Root) -> None:
    root.publish(model(), version=5)
    before = root.objects()
    error = failure(root, version=5)
    assert isinstance(error, FileExistsError)
    assert "must have a larger number than 5" in str(error)
    assert root.objects() == before


def test_a_root_with_the_scheme_of_files_is_local(tmp_path: Path) -> None:
    assert publish(model(), f"file://{tmp_path}").path == str(tmp_path / "0000000000")
    assert (tmp_path / "latest").is_symlink()


def test_the_newest_versions_are_kept(root: Root) -> None:
    for number in range(4):
        root.publish(model(number), keep=2)
    assert root.numbers() == [2, 3]
    assert {name.split("/")[0] for name in root.objects()} == {"0000000002", "0000000003", "latest"}


def test_the_steps_of_a_run_are_not_mixed_with_versions(root: Root) -> None:
    save_step(root.steps, 1, {"model": model()}, write=root.options)
    error = failure(root)
    assert isinstance(error, CheckpointError)
    assert "is a checkpoint, which a run saved; publish to another root" in str(error)


@pytest.mark.parametrize("options", [{"base": "latest"}, {"base": 3}, {"delta": True}])
def test_a_base_beneath_a_url_is_refused(root: Root, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="versions beneath a URL share no files"):
        root.publish(model(), **options)


@pytest.mark.parametrize(
    ("method", "name"),
    [("put", "model.safetensors"), ("put_if_absent", "checksums"), ("put_if_absent", MARKER)],
)
def test_a_failed_publication_leaves_the_version_before(
    root: Root, monkeypatch: pytest.MonkeyPatch, method: str, name: str
) -> None:
    root.publish(model(1.0))
    before = root.objects()
    fail_once(monkeypatch, method, name)
    error = failure(root)
    assert "denied" in str(error)
    assert root.objects() == before


def test_a_version_is_published_although_latest_cannot_be_replaced(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.publish(model(1.0))
    fail_once(monkeypatch, "swap", "latest")
    error = failure(root)
    assert f"{root.url}/0000000001 is published, but latest does not lead to it" in str(error)
    assert root.latest() == b"0000000000"
    root.publish(model(3.0))
    assert root.latest() == b"0000000002"


def test_an_interrupted_publication_is_replaced(root: Root, tmp_path: Path) -> None:
    several = Safetensors(max_shard_size=1000)
    root.publish(model(1.0), version=7, format=several)
    root.store.delete([f"0000000007/{MARKER}"])
    assert root.numbers() == []
    root.publish(model(2.0), version=7, format=several)
    assert root.numbers() == [7]
    assert_equal(values(root, 7, tmp_path / "model"), model(2.0))


def test_a_version_whose_objects_are_deleted_meanwhile_is_not_published(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = ObjectStore.put_if_absent

    def deleting(store: ObjectStore, name: str, data: bytes) -> Any:
        if name == "torch_ckpt.checksums":
            store.delete(["model.safetensors"])
        return create(store, name, data)

    monkeypatch.setattr(ObjectStore, "put_if_absent", deleting)
    error = failure(root)
    assert "another process has deleted this object" in str(error)
    assert root.numbers() == []


def test_exports_publish_beneath_a_url(root: Root, tmp_path: Path) -> None:
    export = Export(root.url, keep=2, options=root.options)
    with CheckpointManager(tmp_path / "steps", interval=100, export=export) as manager:
        for step in (2, 4, 6, 8):
            manager.export(step, {"model": model(float(step))})
    assert root.numbers() == [6, 8]
    assert_equal(values(root, 8, tmp_path / "model"), model(8.0))


def test_an_export_after_a_rewind_deletes_the_stale_versions(
    root: Root, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state, export = {"model": model(1.0)}, Export(root.url, options=root.options)
    with CheckpointManager(tmp_path / "steps", interval=10, export=export) as manager:
        for step in (10, 20, 30):
            manager.save(step, state)
            manager.export(step, state)
    assert root.latest() == b"0000000030"
    with CheckpointManager(tmp_path / "steps", interval=10, export=export) as manager:
        with pytest.warns(UserWarning, match="later steps"):
            manager.restore(state, 10)
        state = {"model": model(4.0)}
        with caplog.at_level(logging.WARNING):
            manager.export(20, state)
    assert "deleting the stale versions [20, 30]" in caplog.text
    assert root.numbers() == [10, 20]
    assert root.latest() == b"0000000020"
    assert_equal(values(root, 20, tmp_path / "model"), model(4.0))
