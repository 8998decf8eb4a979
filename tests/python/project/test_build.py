"""Messages of a build that lacks something, and of an import without a build."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house import REPOSITORY

pytest.importorskip("setuptools")


def built(tmp_path: Path, **programs: str) -> str:
    """Runs ``setup.py build`` with only these programs on the PATH; returns its error output."""
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    for name in ("cat", "sh"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build"],
        cwd=REPOSITORY,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stdout.count("\n") <= 1
    return done.stderr.strip()


def test_a_build_without_cmake_names_it(tmp_path: Path) -> None:
    assert built(tmp_path) == (
        "torch_ckpt needs CMake to be built: apt install cmake, or pip install cmake."
    )


def test_a_build_without_a_compiler_names_it(tmp_path: Path) -> None:
    assert built(tmp_path, cmake="exit 1") == (
        "torch_ckpt needs a compiler for C++20, and there is no c++ or g++ or clang++: "
        "apt install g++."
    )


def test_a_build_without_a_library_says_what_cmake_says_of_it(tmp_path: Path) -> None:
    output = """-- Found Threads: TRUE
CMake Error at CMakeLists.txt:47 (message):
  torch_ckpt needs ISA-L for its checksums:
  apt install libisal-dev.


-- Configuring incomplete, errors occurred!"""
    said = built(tmp_path, cmake=f"cat <<'END'\n{output}\nEND\nexit 1", **{"g++": "exit 0"})
    assert said == "torch_ckpt needs ISA-L for its checksums: apt install libisal-dev."


# Without the finder of a clone that is installed as editable.
_IMPORT = """
import sys
sys.meta_path = [f for f in sys.meta_path if "editable" not in f"{f} {f.__module__}"]
import torch_ckpt
"""


def test_an_import_of_a_clone_that_is_not_built_says_so(tmp_path: Path) -> None:
    (tmp_path / "torch_ckpt").mkdir()
    shutil.copy(REPOSITORY / "torch_ckpt/__init__.py", tmp_path / "torch_ckpt")
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: the extension of torch_ckpt is not built (there is no _core.so in "
        f"{tmp_path}/torch_ckpt): run `make build` in the clone, or `pip install .` and import it "
        "elsewhere"
    )
