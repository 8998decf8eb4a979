"""The kit for a GPU machine without network: the extension builds with the files of the kit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.layers import REPOSITORY

pytestmark = [pytest.mark.full, pytest.mark.timeout(2000)]

#: All that scripts/gpu_run.sh reads of the checkout for the part `build` and for its record.
_COPIED = ("CMakeLists.txt", "benchmarks", "cmake", "csrc", "scripts", "torch_ckpt")


def test_the_extension_builds_from_the_kit_and_is_imported(tmp_path: Path) -> None:
    tree, kit, out = (tmp_path / name for name in ("tree", "kit", "out"))
    made = subprocess.run(
        ["scripts/gpu_kit.sh", sys.executable, str(kit)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    if "No matching distribution" in made.stderr or "Could not find a version" in made.stderr:
        pytest.skip(f"the kit contains a package of PyPI: {made.stderr.strip().splitlines()[-1]}")
    assert made.returncode == 0, made.stderr
    tree.mkdir()
    for name in _COPIED:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("*.so", "results"))
        else:
            shutil.copy(source, tree)
    environment = {
        **os.environ,
        "PARTS": "build",
        "BUILD_SECONDS": "1800",  # 280 to 460 with two cores that do nothing else
        "GPU_KIT": str(kit),
        "OUT": str(out),
        "PYTHON": sys.executable,
    }
    run = subprocess.run(
        ["scripts/gpu_run.sh"], cwd=tree, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 3, run.stdout + run.stderr  # no device, and the part passed
    cache = (tree / "build/gpu/CMakeCache.txt").read_text()
    for name in ("Boost_INCLUDE_DIR", "ISAL_INCLUDE_DIR", "ISAL_LIBRARY", "ZLIB_INCLUDE_DIR"):
        found = re.search(rf"^{name}:\w+=(.*)$", cache, re.M)
        assert found is not None
        assert found[1].startswith(str(kit)), f"{name} is not the kit's, but {found[1]}"
