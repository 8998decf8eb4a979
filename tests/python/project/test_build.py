"""Contents of builds, and messages of incomplete builds and of imports without a build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from tests.layers import REPOSITORY
from torch_ckpt import __version__
from torch_ckpt._base.version import SUPPORTED_TORCH, check_torch_version


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("-DISAL_LIBRARY=", "torch_ckpt needs ISA-L for its checksums: apt install libisal-dev."),
        (
            "-DBoost_INCLUDE_DIR=",
            "torch_ckpt needs the headers of Boost 1.78 or newer (Boost.Asio): apt install "
            "libboost1.81-dev (Debian 12) or libboost-dev (Ubuntu 24.04), or set BOOST_ROOT to the "
            "folder of a newer Boost.",
        ),
        (
            "-DCMAKE_DISABLE_FIND_PACKAGE_pybind11=ON",
            "torch_ckpt needs pybind11 3: pip install pybind11.",
        ),
    ],
)
def test_a_build_without_a_library_names_it(tmp_path: Path, missing: str, message: str) -> None:
    """pip prints this output of CMake if a build fails."""
    options = ["-DTORCH_CKPT_BUILD_PYTHON=ON", f"-DPython_EXECUTABLE={sys.executable}", missing]
    configured = subprocess.run(
        ["cmake", "-S", REPOSITORY, "-B", tmp_path, *options], capture_output=True, text=True
    )
    assert configured.returncode == 1
    assert message in " ".join(configured.stderr.split())


@pytest.mark.parametrize(
    ("option", "variable", "folder"),
    [
        ("-DBoost_ROOT=", None, ""),
        (None, "Boost_ROOT", ""),
        (None, "BOOST_ROOT", ""),
        ("-DBoost_DIR=", None, "lib/cmake/Boost-1.99.0"),
        ("-DCMAKE_PREFIX_PATH=", None, ""),
    ],
)
def test_a_build_uses_the_boost_that_the_user_names(
    tmp_path: Path, option: str | None, variable: str | None, folder: str
) -> None:
    named = tmp_path / "a boost"
    (named / folder).mkdir(parents=True)
    headers = named / "include/boost"
    (headers / "asio").mkdir(parents=True)
    (headers / "asio/post.hpp").touch()
    # A version that is too old ends the configuration.
    (headers / "version.hpp").write_text("#define BOOST_VERSION 107700\n")
    options = [] if option is None else [f"{option}{named / folder}"]
    configured = subprocess.run(
        ["cmake", "-S", REPOSITORY, "-B", tmp_path / "build", *options],
        env=os.environ | ({} if variable is None else {variable: str(named)}),
        capture_output=True,
        text=True,
    )
    assert "needs the headers of Boost 1.78 or newer" in configured.stderr
    cache = (tmp_path / "build/CMakeCache.txt").read_text()
    found = next(line for line in cache.splitlines() if line.startswith("Boost_INCLUDE_DIR:"))
    assert Path(found.partition("=")[2]).resolve() == named / "include"


def test_a_second_build_packs_no_module_of_the_first(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core")
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / file, tmp_path / file)
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.24)\nproject(nothing LANGUAGES NONE)\n"
        "add_custom_target(_C)\n"
    )
    package = tmp_path / "torch_ckpt"
    (package / "_base").mkdir(parents=True)
    for name in ("__init__.py", "kept.py", "removed.py", "_base/__init__.py"):
        (package / name).touch()
    shutil.copy(REPOSITORY / "torch_ckpt/_base/version.py", package / "_base")

    def build() -> set[str]:
        command = [sys.executable, "setup.py", "build"]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
        return {path.name for path in tmp_path.glob("build/lib*/torch_ckpt/*.py")}

    assert build() == {"__init__.py", "kept.py", "removed.py"}
    (package / "removed.py").unlink()
    assert build() == {"__init__.py", "kept.py"}


# Without the import hook of an editable install.
_IMPORT = """
import sys
sys.meta_path = [f for f in sys.meta_path if "editable" not in f"{f} {f.__module__}"]
%s
"""


def import_copy(
    directory: Path, statement: str, *, is_built: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs an import of a copy of the package in this directory, and expects that it fails."""
    left_out = () if is_built else ("*.so",)
    shutil.copytree(
        REPOSITORY / "torch_ckpt",
        directory / "torch_ckpt",
        ignore=shutil.ignore_patterns(*left_out),
    )
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT % statement],
        cwd=directory,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    return done


def test_an_import_of_an_unbuilt_clone_names_the_build_command(tmp_path: Path) -> None:
    assert import_copy(tmp_path, "import torch_ckpt").stderr.splitlines()[-1] == (
        "ImportError: the extension module of torch_ckpt is not built for this Python (there is no "
        f"_core*.so in {tmp_path}/torch_ckpt): run `make build` in the source tree, or run "
        "`pip install .` and import torch_ckpt from another directory"
    )


@pytest.mark.parametrize(
    "statement",
    [
        "import torch, torch_ckpt",
        "from torch_ckpt import save",
        "from torch_ckpt import _C",
        "import torch_ckpt.saving.writer",
        "import torch_ckpt.megatron",
    ],
)
def test_an_import_with_an_old_torch_names_the_supported_versions(
    tmp_path: Path, statement: str
) -> None:
    (tmp_path / "torch.py").write_text('__version__ = "2.10.1+cpu"\n')
    done = import_copy(tmp_path, statement, is_built=True)
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: torch_ckpt {__version__} needs torch>=2.11, but found torch 2.10.1+cpu: run "
        "`pip install 'torch>=2.11'`"
    )


def test_an_import_with_an_untested_torch_warns_and_continues(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text('__version__ = "2.16.0a0+git"\n')
    error = import_copy(tmp_path, "import torch, torch_ckpt").stderr
    assert error.count("UserWarning") == 1
    assert "is tested with torch 2.11 to 2.15, but not with torch 2.16.0a0+git" in error
    assert error.splitlines()[-1].startswith(
        "ImportError: the extension module of torch_ckpt is not built"
    )


@pytest.mark.parametrize("version", ["2.11.0", "2.15.2+cu132", torch.__version__])
def test_supported_versions_of_torch_are_silent(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_torch_version(version)


def test_pip_and_the_check_agree_on_the_supported_versions() -> None:
    (major, first), (_, end) = SUPPORTED_TORCH
    text = (REPOSITORY / "pyproject.toml").read_text()
    assert f'dependencies = ["torch>={major}.{first}"]' in text
    assert f'"torch>={major}.{first},<{major}.{end}",' in text
