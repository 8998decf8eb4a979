"""pip's door into the CMake build: nothing is compiled by a second recipe.

torch is not a build requirement: pip's isolated build environment would fetch its own copy (5 GB,
and perhaps another version than the one that will load the extension). The environment's own torch
is asked instead, in a subprocess that pip's isolation does not reach.

What the build needs is looked for before setuptools prints a line for each file.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
BUILD = ROOT / "build" / f"python-{sys.version_info[0]}.{sys.version_info[1]}"
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}


def require_tools() -> None:
    """Exits with a sentence if CMake or a C++ compiler is missing."""
    if shutil.which("cmake") is None:
        sys.exit("torch_ckpt needs CMake to be built: apt install cmake, or pip install cmake.")
    # CXX may hold options, too.
    compilers = (
        [os.environ["CXX"].split()[0]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    )
    if not any(map(shutil.which, compilers)):
        sys.exit(
            f"torch_ckpt needs a compiler for C++20, and there is no {' or '.join(compilers)}: "
            "apt install g++."
        )


def configure(*options: str) -> None:
    """Runs CMake's first step, which finds Boost, ISA-L, zlib and torch.

    Exits with CMake's own sentence if one of them is missing.
    """
    require_tools()
    done = subprocess.run(
        [
            "cmake",
            *("-S", str(ROOT), "-B", str(BUILD)),
            "-DTORCH_CKPT_BUILD_PYTHON=ON",
            f"-DPYTHON_EXECUTABLE={sys.executable}",
            "-DCMAKE_BUILD_TYPE=Release",
            *options,
            *os.environ.get("TORCH_CKPT_CMAKE_ARGS", "").split(),
        ],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        said = re.search(r"^CMake Error[^\n]*\n+((?:  [^\n]*\n)+)", done.stdout, re.M)
        sys.exit(" ".join(said[1].split()) if said else done.stdout)
    print(done.stdout, end="")


class CheckedBuild(build):
    def run(self) -> None:
        configure()
        super().run()


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        configure(f"-DCMAKE_INSTALL_PREFIX={target}")
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1))
        for arguments in (
            ["--build", str(BUILD), "--target", "_C", "--parallel", jobs],
            ["--install", str(BUILD)],
        ):
            subprocess.run(["cmake", *arguments], check=True, env=ENVIRONMENT)

    def copy_extensions_to_source(self) -> None:
        # setuptools would copy `_C.so`, without the library of the core and `_core.so`.
        command = ["cmake", "--install", str(BUILD), "--prefix", str(ROOT / "torch_ckpt")]
        subprocess.run(command, check=True, env=ENVIRONMENT)

    def get_ext_filename(self, fullname: str) -> str:
        # The CMake targets are plain `_core.so` and `_C.so`, with no tag of the interpreter.
        return os.path.join(*fullname.split(".")) + ".so"


setup(
    ext_modules=[Extension("torch_ckpt._C", sources=[])],
    cmdclass={"build": CheckedBuild, "build_ext": CMakeBuild},
)
