"""Messages of a build that lacks something, and of an import without a build."""

from __future__ import annotations

import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from tests.layers import REPOSITORY
from torch_ckpt._base.version import SUPPORTED_TORCH, __version__, check_torch_version


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("-DISAL_LIBRARY=", "torch_ckpt needs ISA-L for its checksums: apt install libisal-dev."),
        (
            "-DBoost_INCLUDE_DIR=",
            "torch_ckpt needs the headers of Boost 1.78 or newer (Boost.Asio): apt install "
            "libboost1.81-dev (Debian 12) or libboost-dev (Ubuntu 24.04).",
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
