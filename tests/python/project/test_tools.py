"""The tools of contributors: hooks, lint and the package's metadata agree."""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.layers import REPOSITORY
from torch_ckpt._base.version import __version__

yaml = pytest.importorskip("yaml")


def test_the_hooks_run_what_make_lint_runs() -> None:
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", (REPOSITORY / "Makefile").read_text(), re.M)
    assert recipe is not None
    linted = {
        re.sub(
            r"^\$\(TIMED\) \S+ |\$\(BIN\)/| \$\(CXX_FILES\)| \.$| \"\$\(LINT_SINCE\)\"", "", line
        )
        for line in recipe[1].replace("\t", "").splitlines()
    }
    (repo,) = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = {
        hook["entry"].removeprefix(".venv/bin/").removesuffix(' ""').replace(" .", "")
        for hook in repo["hooks"]
    }
    assert repo["repo"] == "local"
    assert hooks == linted


def test_the_configuration_of_the_hooks_is_valid() -> None:
    pytest.importorskip("pre_commit")
    subprocess.run(
        [sys.executable, "-m", "pre_commit", "validate-config", ".pre-commit-config.yaml"],
        cwd=REPOSITORY,
        check=True,
    )


def test_the_package_metadata_names_licence_authors_and_the_supported_torch(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, tmp_path)
    (tmp_path / "torch_ckpt" / "_base").mkdir(parents=True)
    shutil.copy(REPOSITORY / "torch_ckpt/_base/version.py", tmp_path / "torch_ckpt/_base")
    subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    found = email.message_from_string((tmp_path / "torch_ckpt.egg-info/PKG-INFO").read_text())
    assert found["Version"] == __version__
    assert found["License-Expression"] == "BSD-3-Clause"
    assert found["License-File"] == "LICENSE"
    assert found["Author"] == "the torch_ckpt authors"
    assert {"torch<2.16,>=2.11", "torch>=2.11,<2.16"} & set(found.get_all("Requires-Dist", []))


def test_a_source_distribution_has_all_files_that_the_build_reads(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("no git checkout")
    for name in listed.stdout.split("\0"):
        if (REPOSITORY / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, tree / name)
    (tree / "torch_ckpt" / "_C.so").touch()
    subprocess.run(
        [sys.executable, "setup.py", "-q", "sdist", "-d", tmp_path],
        cwd=tree,
        check=True,
        capture_output=True,
    )
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    needed = {"CMakeLists.txt", "LICENSE", "README.md", "setup.py", "pyproject.toml"}
    for folder in ("csrc", "cmake", "torch_ckpt"):
        files = (path for path in (tree / folder).rglob("*") if path.is_file())
        needed |= {str(path.relative_to(tree)) for path in files if path.suffix != ".so"}
    assert needed <= names
    assert not [name for name in names if name.endswith(".so")]
