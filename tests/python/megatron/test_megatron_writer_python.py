"""Megatron's writer in Python: the caller's streams, transforms and object stores."""

from __future__ import annotations

import errno
import io
import os
import pickle
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.api import CheckpointException

from tests.async_saves import (
    Caller,
    assert_checkpoint,
    here,
    names_in,
    open_in_python,
    plan_save,
    save,
    small_state,
    state_of,
)
from tests.gates import Gate
from tests.support import (
    assert_equal,
    files_limited_to,
    stock_save,
)
from torch_ckpt import CheckpointError
from torch_ckpt.megatron import FileSystemWriterAsync

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


class Flip(StreamTransformExtension):
    """Transform that flips every written bit."""

    @staticmethod
    def from_descriptor(version: str) -> Flip:
        return Flip()

    @staticmethod
    def registry_name() -> str:
        return "stream.flip"

    def get_descriptor(self) -> str:
        return "stream.flip"

    def transform_to(self, output: Any) -> Any:
        return Flipped(output)

    def transform_from(self, input: Any) -> Any:
        raise NotImplementedError


class Flipped(io.BytesIO):
    """Stream that passes its contents on when it is closed."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self._output = output

    def close(self) -> None:
        if not self.closed:
            self._output.write(flipped(self.getvalue()))
        super().close()


def flipped(data: bytes) -> bytes:
    return bytes(byte ^ 255 for byte in data)


def test_a_transform_is_applied_to_every_record(tmp_path: Path, caller: Caller) -> None:
    metadata = save(small_state(), tmp_path / "c", caller, thread_count=2, _extensions=[Flip()])
    assert len(names_in(tmp_path / "c")) == 2
    for index, info in metadata.storage_data.items():
        data = (tmp_path / "c" / info.relative_path).read_bytes()
        record = flipped(data[info.offset :][: info.length])
        assert_equal(torch.load(io.BytesIO(record)), small_state()[index.fqn])
        assert info.transform_descriptors == ["stream.flip"]


def test_files_are_opened_by_open_file(tmp_path: Path, caller: Caller) -> None:
    save(state_of(), tmp_path / "c", caller, thread_count=2, open_file=open_in_python)
    assert_checkpoint(tmp_path / "c", state_of())


def test_open_file_gets_path_and_mode_in_concurrent_threads(tmp_path: Path) -> None:
    calls = []
    # Each thread waits until all files are open.
    barrier = threading.Barrier(4)

    def opening(path: str, mode: str) -> Any:
        calls.append((path, mode))
        barrier.wait(60)
        return open(path, mode)

    save(small_state(), tmp_path / "c", thread_count=4, open_file=opening)
    assert sorted(calls) == [(str(tmp_path / "c" / f"__0_{n}.distcp"), "wb") for n in range(4)]
    assert_checkpoint(tmp_path / "c", small_state())


@pytest.mark.parametrize("number", range(4))
def test_the_error_of_any_python_thread_fails_the_save_and_leaves_no_file(
    tmp_path: Path, number: int
) -> None:
    def opening(path: str, mode: str) -> Any:
        if path.endswith(f"_{number}.distcp"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return open(path, mode)

    with pytest.raises(CheckpointException, match=rf"Permission denied.*__0_{number}\.distcp"):
        save(small_state(), tmp_path / "c", thread_count=4, open_file=opening)
    assert os.listdir(tmp_path / "c") == []


@pytest.mark.parametrize("threads", [1, 4])
def test_a_failed_write_in_python_leaves_no_file(tmp_path: Path, threads: int) -> None:
    planned = plan_save(
        small_state(), tmp_path / "c", thread_count=threads, open_file=open_in_python
    )
    with files_limited_to(1000):
        here(planned.writer)
    with pytest.raises(CheckpointException, match="File too large"):
        planned.finalize()
    assert os.listdir(tmp_path / "c") == []


def test_a_write_in_python_can_be_cancelled(tmp_path: Path, gate: Gate) -> None:
    def opening(path: str, mode: str) -> Any:
        gate()
        return open(path, mode)

    planned = plan_save(small_state(), tmp_path / "c", thread_count=2, open_file=opening)
    staged = planned.stage()
    gate.wait()
    staged.cancel()
    gate.open()
    planned.run()
    assert "aborted" in planned.failure()
    assert names_in(tmp_path / "c") == []


# --- through multistorageclient ------------------------------------------------------------------


class FakeStore:
    """The functions of multistorageclient that the writer uses, with a dictionary as the store."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.synced: set[str] = set()
        self.made: list[str] = []
        self.fails: str | None = None
        self.os = self

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.made.append(path)

    def open(self, path: str, mode: str) -> Any:
        if self.fails is not None and self.fails in path:
            raise ConnectionError(f"{path}: the store does not answer")
        store = self

        class Stream(io.BytesIO):
            def fsync(self) -> None:
                store.synced.add(path)

            def close(self) -> None:
                store.objects[path] = self.getvalue()
                super().close()

        return Stream()


@pytest.fixture
def msc(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    store = FakeStore()
    module: Any = types.ModuleType("multistorageclient")
    module.open, module.os = store.open, store
    monkeypatch.setitem(sys.modules, "multistorageclient", module)
    return store


def test_an_object_store_gets_files_and_metadata_with_torchs_version(
    msc: FakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c").mkdir()
    monkeypatch.chdir(tmp_path / "c")
    save(state_of(), "msc://bucket/c", thread_count=2, use_msc=True)
    assert os.listdir() == []
    assert sorted(msc.objects) == [
        f"msc://bucket/c/{name}" for name in (".metadata", "__0_0.distcp", "__0_1.distcp")
    ]
    assert msc.synced == {f"msc://bucket/c/__0_{n}.distcp" for n in range(2)}
    assert set(msc.made) == {"msc://bucket/c"}
    for path, data in msc.objects.items():
        (tmp_path / os.path.basename(path)).write_bytes(data)
    assert_checkpoint(tmp_path, state_of())
    stock_save(small_state(), tmp_path / "stock")
    stock = pickle.loads((tmp_path / "stock" / ".metadata").read_bytes())
    ours = pickle.loads(msc.objects["msc://bucket/c/.metadata"])
    assert getattr(ours, "version", None) == getattr(stock, "version", None)


def test_an_error_of_the_object_store_fails_the_save(msc: FakeStore) -> None:
    msc.fails = "__0_1"
    with pytest.raises(CheckpointException, match="the store does not answer"):
        save(state_of(), "msc://bucket/c", thread_count=2, use_msc=True)
    assert "msc://bucket/c/.metadata" not in msc.objects


def test_paths_of_object_stores_are_valid() -> None:
    assert FileSystemWriterAsync.validate_checkpoint_id("msc://bucket/c")


def test_use_msc_without_its_package_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "multistorageclient", None)
    with pytest.raises(CheckpointError, match="multi-storage-client"):
        FileSystemWriterAsync(tmp_path, use_msc=True)
