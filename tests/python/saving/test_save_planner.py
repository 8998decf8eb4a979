"""torch_ckpt.SavePlanner with dcp.save and dcp.async_save."""

from __future__ import annotations

import io
import pickle
import weakref
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.metadata import StorageMeta

import torch_ckpt
from tests.support import assert_equal, cause_of, f32, nested_state, save_with, stock_load


def test_async_save_of_torch_uses_the_planner(tmp_path: Path) -> None:
    state = {"w": f32(5, 2), "epoch": 3}
    future = dcp.async_save(
        state,
        storage_writer=torch_ckpt.FileSystemWriter(tmp_path),
        planner=torch_ckpt.SavePlanner(),
        no_dist=True,
    )
    future.result()  # type: ignore[union-attr]
    loaded = {"w": torch.zeros(5, 2), "epoch": 0}
    stock_load(loaded, tmp_path)
    assert loaded["epoch"] == 3
    assert_equal(loaded["w"], state["w"])


class Reversed(StreamTransformExtension):
    """Stores bytes in reverse order."""

    @staticmethod
    def registry_name() -> str:
        return "test.reversed"

    @staticmethod
    def from_descriptor(version: str) -> Reversed:
        return Reversed()

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        class Stream(io.BytesIO):
            def close(self) -> None:
                if not self.closed:
                    output.write(self.getvalue()[::-1])
                super().close()

        return Stream()

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        return io.BytesIO(input.read()[::-1])


def fsspec_filesystem() -> Any:
    try:
        return import_module("torch.distributed.checkpoint.fsspec_filesystem")
    except ModuleNotFoundError:  # torch before 2.15
        return import_module("torch.distributed.checkpoint._fsspec_filesystem")


WRITERS: dict[str, Callable[[Path], dcp.StorageWriter]] = {
    "ours": torch_ckpt.FileSystemWriter,
    "torch's": dcp.FileSystemWriter,
    "fsspec's": lambda path: fsspec_filesystem().FsspecWriter(f"file://{path}"),
    "ours with an extension": lambda path: torch_ckpt.FileSystemWriter(
        path, _extensions=[Reversed()]
    ),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_stock_torch_loads_what_any_writer_saves_with_the_planner(
    tmp_path: Path, kind: str
) -> None:
    state = nested_state()
    save_with(WRITERS[kind](tmp_path), state, planner=torch_ckpt.SavePlanner())
    loaded = nested_state(seed=1)
    registry = ExtensionRegistry()
    registry.register(Reversed)
    reader = dcp.FileSystemReader(tmp_path, _extension_registry=registry)
    dcp.load(loaded, storage_reader=reader, no_dist=True)
    assert_equal(loaded, state)


def test_one_planner_can_be_used_with_both_kinds_of_writers(tmp_path: Path) -> None:
    planner = torch_ckpt.SavePlanner()
    writers = [torch_ckpt.FileSystemWriter, dcp.FileSystemWriter, torch_ckpt.FileSystemWriter]
    for number, writer in enumerate(writers):
        path = tmp_path / str(number)
        save_with(writer(path), {"w": torch.full((3,), float(number))}, planner=planner)
        loaded = {"w": torch.zeros(3)}
        stock_load(loaded, path)
        assert_equal(loaded["w"], torch.full((3,), float(number)))


def test_a_foreign_writer_that_returns_our_storage_meta_is_refused(tmp_path: Path) -> None:
    class Borrowing(dcp.FileSystemWriter):
        def storage_meta(self) -> StorageMeta | None:
            return torch_ckpt.FileSystemWriter(tmp_path).storage_meta()

    with pytest.raises(dcp.CheckpointException) as caught:
        save_with(Borrowing(tmp_path), {"w": f32(3)}, planner=torch_ckpt.SavePlanner())
    assert "torch_ckpt.FileSystemWriter" in str(cause_of(caught.value))
    assert not (tmp_path / ".metadata").exists()


@pytest.mark.parametrize("planner", [torch_ckpt.SavePlanner, dcp.DefaultSavePlanner])
def test_metadata_has_only_classes_of_torch(
    tmp_path: Path, planner: Callable[[], dcp.SavePlanner]
) -> None:
    save_with(torch_ckpt.FileSystemWriter(tmp_path), {"w": f32(3)}, planner=planner())
    data = (tmp_path / ".metadata").read_bytes()
    assert b"torch_ckpt.saving" not in data
    metadata = pickle.loads(data)
    assert type(metadata.storage_meta) is StorageMeta
    assert metadata.storage_meta.checkpoint_id == str(tmp_path)


def test_a_tensor_without_values_is_named(tmp_path: Path) -> None:
    state = {"head": torch.empty(3, device="meta")}
    with pytest.raises(dcp.CheckpointException) as caught:
        save_with(torch_ckpt.FileSystemWriter(tmp_path), state, planner=torch_ckpt.SavePlanner())
    assert "head" in str(cause_of(caught.value))


def test_after_the_save_the_planner_holds_no_tensor(tmp_path: Path) -> None:
    planner = torch_ckpt.SavePlanner()
    state = {"w": f32(3)}
    held = weakref.ref(state["w"])
    save_with(torch_ckpt.FileSystemWriter(tmp_path), state, planner=planner)
    del state
    assert held() is None
