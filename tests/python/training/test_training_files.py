"""Directories and files that may be remote."""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path

import fsspec
import pytest

from torch_ckpt.training import mkdir
from torch_ckpt.training.file_operations import join, put

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


def test_training_needs_no_module_that_the_public_names_do_not_import() -> None:
    found = subprocess.run(
        [sys.executable, "-c", AFTERWARDS], capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == []


def test_importing_torch_ckpt_does_not_import_training() -> None:
    code = "import sys, torch_ckpt; print('torch_ckpt.training' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False"]


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_mkdir_creates_a_local_directory_and_its_parents(tmp_path: Path, prefix: str) -> None:
    mkdir(f"{prefix}{tmp_path}/a/b")
    assert (tmp_path / "a" / "b").is_dir()


def test_mkdir_creates_a_directory_on_another_file_system(memory: str) -> None:
    mkdir(f"{memory}/a/b")
    file_system, place = fsspec.core.url_to_fs(f"{memory}/a/b")
    assert file_system.isdir(place)


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_mkdir_keeps_a_directory_and_refuses_the_name_of_a_file(
    tmp_path: Path, prefix: str
) -> None:
    (tmp_path / "file").write_text("x")
    mkdir(f"{prefix}{tmp_path}")
    with pytest.raises(FileExistsError, match="file"):
        mkdir(f"{prefix}{tmp_path}/file")
    assert (tmp_path / "file").read_text() == "x"


def test_mkdir_refuses_the_name_of_a_file_on_another_file_system(memory: str) -> None:
    fsspec.filesystem("memory").pipe_file(f"{memory}/file", b"x")
    with pytest.raises(FileExistsError, match=f"{memory}/file"):
        mkdir(f"{memory}/file")


def test_mkdir_names_a_url_with_an_unknown_protocol() -> None:
    with pytest.raises(ValueError, match=r"nowhere://run: Protocol not known: nowhere"):
        mkdir("nowhere://run")


def test_mkdir_names_the_package_that_a_url_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    # Entries of tests that have used it. `fsspec.registry` is a view of this module's dict.
    registry = sys.modules["fsspec.registry"]
    monkeypatch.delitem(registry._registry, "s3", raising=False)
    with pytest.raises(ImportError, match=r"s3://bucket/run: Install s3fs"):
        mkdir("s3://bucket/run")


@pytest.mark.parametrize("directory", ["run", "run/", "memory://run", "memory://run/"])
def test_a_name_is_joined_with_one_slash(directory: str) -> None:
    assert join(directory, "trace") == f"{directory.rstrip('/')}/trace"


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_a_copy_to_a_local_directory_replaces_the_old_file(tmp_path: Path, prefix: str) -> None:
    (tmp_path / "source").write_text("new")
    (tmp_path / "target").write_text("old")
    put(tmp_path / "source", f"{prefix}{tmp_path}/target")
    assert (tmp_path / "target").read_text() == "new"


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
