"""The tools of contributors: hooks, lint and the package's metadata agree."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.layers import REPOSITORY
from torch_ckpt import __version__

yaml = pytest.importorskip("yaml")


def test_the_hooks_run_what_make_lint_and_make_tidy_run() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    recipes = re.findall(r"^(?:lint|tidy):.*\n((?:\t.*\n)+)", makefile, re.M)
    linted = {
        re.sub(
            r"^\$\(TIMED\) \S+ |\$\(BIN\)/| \$\(CXX_FILES\)| \.$| \"\$\(LINT_SINCE\)\"", "", line
        )
        for line in "".join(recipes).replace("\t", "").splitlines()
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


def test_the_documentation_lists_the_files_of_the_second_lane() -> None:
    """A file is in the second lane if its ``pytestmark`` has the mark ``full``."""
    full: dict[str, list[str]] = {}
    for file in sorted((REPOSITORY / "tests").rglob("test_*.py")):
        marks = re.search(r"^pytestmark = (\[[^\]]*\]|.*)", file.read_text(), re.M)
        if marks is not None and "pytest.mark.full" in marks[1]:
            folder = str(file.parent.relative_to(REPOSITORY))
            full.setdefault(folder, []).append(f"`{file.name}`")
    wanted = "".join(f"| {folder} | {', '.join(names)} |\n" for folder, names in full.items())
    documented = re.search(
        r"<!-- full: begin -->\n\| directory \| files \|\n\|---\|---\|\n(.*)<!-- full: end -->",
        (REPOSITORY / "docs/testing.md").read_text(),
        re.S,
    )
    assert documented is not None
    assert documented[1] == wanted, f"the table in docs/testing.md should be:\n{wanted}"


def test_the_environment_imports_the_package_of_this_checkout() -> None:
    """Checkouts share the installed dependencies, but not the package."""
    program = "import torch, torch_ckpt; print(torch.__file__, torch_ckpt.__file__, sep='\\n')"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd="/",
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    dependency, package = (Path(line).resolve() for line in done.stdout.splitlines())
    assert package == REPOSITORY / "torch_ckpt" / "__init__.py"
    assert not dependency.is_relative_to(REPOSITORY / "torch_ckpt")


@pytest.fixture(scope="module")
def source_distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the source distribution of the tree; returns the folder that it unpacks to."""
    pytest.importorskip("scikit_build_core")
    folder = tmp_path_factory.mktemp("sdist")
    command = (
        "import sys; from scikit_build_core.setuptools.build_meta import build_sdist; "
        "build_sdist(sys.argv[1])"
    )
    subprocess.run(
        [sys.executable, "-c", command, folder], cwd=REPOSITORY, check=True, capture_output=True
    )
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return folder / f"torch_ckpt-{__version__}"


def test_the_package_metadata_names_licence_authors_and_the_supported_torch(
    source_distribution: Path,
) -> None:
    found = email.message_from_string((source_distribution / "PKG-INFO").read_text())
    assert found["Version"] == __version__
    assert found["License-Expression"] == "BSD-3-Clause"
    licences = {"LICENSE", *(f"licenses/{name}.txt" for name in ("isa-l", "pybind11", "zlib"))}
    assert set(found.get_all("License-File", [])) == licences
    assert found["Author"] == "the torch_ckpt authors"
    assert "torch>=2.11" in found.get_all("Requires-Dist", [])


def test_a_source_distribution_has_all_files_that_the_build_reads(
    source_distribution: Path,
) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "csrc", "cmake", "torch_ckpt"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("no git checkout")
    needed = {name for name in listed.stdout.splitlines() if (REPOSITORY / name).is_file()}
    needed |= {"CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml", "setup.py"}
    files = (path for path in source_distribution.rglob("*") if path.is_file())
    names = {str(path.relative_to(source_distribution)) for path in files}
    assert needed <= names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]
