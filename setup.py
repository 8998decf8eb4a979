"""pip's door into the CMake build: nothing is compiled by a second recipe.

torch is not a build requirement: pip's isolated build environment would fetch its own copy (5 GB,
and perhaps another version than the one that will load the extension). The environment's own torch
is asked instead, in a subprocess that pip's isolation does not reach.
"""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        build = ROOT / "build" / f"python-{sys.version_info[0]}.{sys.version_info[1]}"
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        options = [
            "-DTORCH_CKPT_BUILD_PYTHON=ON",
            f"-DPYTHON_EXECUTABLE={sys.executable}",
            f"-DCMAKE_INSTALL_PREFIX={target}",
            "-DCMAKE_BUILD_TYPE=Release",
            *os.environ.get("TORCH_CKPT_CMAKE_ARGS", "").split(),
        ]
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1))
        for arguments in (
            ["-S", str(ROOT), "-B", str(build), *options],
            ["--build", str(build), "--target", "_C", "--parallel", jobs],
            ["--install", str(build)],
        ):
            subprocess.run(["cmake", *arguments], check=True, env=environment)

    def get_ext_filename(self, fullname: str) -> str:
        # The CMake target is plain `_C.so`, with no tag of the interpreter in its name.
        return os.path.join(*fullname.split(".")) + ".so"


setup(ext_modules=[Extension("torch_ckpt._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
