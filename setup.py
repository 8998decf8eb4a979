"""Builds the package: setuptools packs it, and scikit-build-core's plugin runs CMake.

CMakeLists.txt has the recipe for the extension, and pyproject.toml everything else.
"""

from setuptools import setup

setup(cmake_source_dir=".")
