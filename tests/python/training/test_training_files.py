"""Directories and files that may be remote."""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path

import fsspec
import pytest

from torch_ckpt.training import mkdir
from torch_ckpt.training.file_operations import put

AFTERWARDS = """
import sys
from torch_ckpt import *
before = set(sys.modules)
import torch_ckpt.training
print(*sorted(m for m in set(sys.modules) - before if not m.startswith("torch_ckpt.training")))
"""


@pytest.fixture
def memory() -> str:
    """Makes a unique URL in memory."""
    return f"memory://{uuid.uuid4().hex}"


@pytest.fixture(params=["local", "file URL", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path, memory: str) -> str:
    return {"local": str(tmp_path), "file URL": f"file://{tmp_path}"}.get(request.param, memory)


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        (AFTERWARDS, []),
        ("import sys, torch_ckpt; print('torch_ckpt.training' in sys.modules)", ["False"]),
    ],
    ids=["training needs no other module", "torch_ckpt does not import training"],
)
def test_an_import_imports_no_module_that_it_does_not_need(code: str, printed: list[str]) -> None:
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == printed


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_mkdir_creates_a_local_directory_and_its_parents(tmp_path: Path, scheme: str) -> None:
    mkdir(f"{scheme}{tmp_path}/a/b")
    assert (tmp_path / "a" / "b").is_dir()


def test_mkdir_keeps_a_directory_and_refuses_the_name_of_a_file(directory: str) -> None:
    file_system, place = fsspec.core.url_to_fs(f"{directory}/file")
    file_system.pipe_file(place, b"x")
    mkdir(directory)
    with pytest.raises(FileExistsError, match=directory.removeprefix("file://") + "/file"):
        mkdir(f"{directory}/file")
    assert file_system.cat_file(place) == b"x"


def test_mkdir_names_a_url_with_an_unknown_protocol() -> None:
    with pytest.raises(ValueError, match="nowhere://run"):
        mkdir("nowhere://run")


def test_mkdir_names_the_package_that_a_url_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "paramiko", None)
    with pytest.raises(ImportError, match=r"sftp://host: .*paramiko"):
        mkdir("sftp://host/run")


def test_a_copy_replaces_the_old_file(directory: str, tmp_path: Path) -> None:
    (tmp_path / "source").write_text("new")
    file_system, place = fsspec.core.url_to_fs(f"{directory}/target")
    file_system.pipe_file(place, b"old")
    put(tmp_path / "source", f"{directory}/target")
    assert file_system.cat_file(place) == b"new"


def test_a_failed_copy_keeps_the_old_file_and_leaves_no_other(
    small_disk: Path, tmp_path: Path
) -> None:
    (tmp_path / "source").write_bytes(bytes(16 << 20))
    (small_disk / "target").write_text("old")
    for target in ("target", "new"):
        with pytest.raises(OSError, match="No space left"):
            put(tmp_path / "source", small_disk / target)
    assert [path.name for path in small_disk.iterdir()] == ["target"]
    assert (small_disk / "target").read_text() == "old"


def test_a_copy_creates_the_directory_on_another_file_system(memory: str, tmp_path: Path) -> None:
    (tmp_path / "source").write_text("x")
    put(tmp_path / "source", f"{memory}/a/target")
    assert fsspec.filesystem("memory").cat_file(f"{memory}/a/target") == b"x"
