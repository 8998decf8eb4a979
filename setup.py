"""Builds the package: setuptools packs it, and scikit-build-core's plugin runs CMake.

CMakeLists.txt has the recipe for the extension, and pyproject.toml everything else.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build import build


class FreshBuild(build):
    """Deletes the modules of earlier builds, which setuptools would pack, too."""

    def run(self) -> None:
        built = Path(self.build_lib, "torch_ckpt")
        if built.exists():
            shutil.rmtree(built)
        super().run()


setup(cmake_source_dir=".", cmdclass={"build": FreshBuild})
