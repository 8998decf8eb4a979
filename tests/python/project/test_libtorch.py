"""The functions of LibTorch that the extension uses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.cpp_extension import include_paths

import torch_ckpt

REPOSITORY = Path(__file__).parents[3]
HEADER = REPOSITORY / "csrc/torch/libtorch.h"
PACKAGE = Path(torch_ckpt.__file__).parent

#: Compares declarations, whose pointers to incomplete classes have other names in torch.
COMPARISON = """
#define USE_CUDA
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include <type_traits>

#include "torch/libtorch.h"

template <class T>
struct Erased {
  using type = T;
};
template <class T>
  requires std::is_class_v<T>
struct Erased<T*> {
  using type = void*;
};
template <class T>
struct Erased<T**> {
  using type = typename Erased<T*>::type*;
};
template <class Result, class... Arguments>
struct Erased<Result(Arguments...)> {
  using type = Result(typename Erased<Arguments>::type...);
};
template <class T>
struct SignatureOf;
template <class Signature>
struct SignatureOf<const torch_ckpt::tensors::libtorch::Function<Signature>> {
  using type = typename Erased<Signature>::type;
};
#define COMPARE(ours, theirs)                                                                  \\
  static_assert(std::is_same_v<SignatureOf<decltype(torch_ckpt::tensors::libtorch::ours)>::type, \\
                               Erased<decltype(theirs)>::type>,                                \\
                #theirs)
"""


def functions() -> dict[str, str]:
    """Returns the names of LibTorch's functions, by our names."""
    text = HEADER.read_text()
    found = re.findall(r"\s(\w+)\(\s*\"((?:aoti_)?torch_\w+)\"", text)
    assert len(found) == len(
        re.findall(r"^inline const (?:Function|Getter|Constant)\b", text, re.M)
    )
    return dict(found)


def undefined_symbols(library: Path) -> list[str]:
    command = [
        "nm",
        "--dynamic",
        "--undefined-only",
        "--demangle",
        "--format=just-symbols",
        library,
    ]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.parametrize("name", ["_C.so", "_core.so", "libtorch_ckpt_core.so"])
def test_no_library_needs_a_symbol_of_torch(name: str) -> None:
    symbols = undefined_symbols(PACKAGE / name)
    assert symbols
    pattern = r"\b(?:at|c10|caffe2|torch)::|\bTHP|\baoti_torch_|\btorch_(?!ckpt)"
    assert [symbol for symbol in symbols if re.search(pattern, symbol)] == []


def test_the_declared_functions_are_those_of_torch(tmp_path: Path) -> None:
    lines = [f"COMPARE({ours}, {theirs});" for ours, theirs in functions().items()]
    source = tmp_path / "comparison.cpp"
    source.write_text(COMPARISON + "\n".join(lines) + "\n")
    includes = [f"-isystem{path}" for path in include_paths()]
    command = ["g++", "-std=c++20", "-fsyntax-only", f"-I{REPOSITORY / 'csrc'}", *includes, source]
    compiled = subprocess.run(command, check=False, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr


def message_of_import(folder: Path, torch_module: str) -> str:
    """Imports the extension with another module torch; returns the last line of the traceback."""
    (folder / "torch.py").write_text(torch_module)
    package = folder / "torch_ckpt"
    package.mkdir()
    (package / "__init__.py").touch()
    for library in PACKAGE.glob("*.so"):
        (package / library.name).symlink_to(library)
    command = [sys.executable, "-c", "import torch_ckpt._C"]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    ended = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert ended.returncode == 1
    return ended.stderr.strip().splitlines()[-1]


def test_an_import_without_libtorch_is_refused_with_advice(tmp_path: Path) -> None:
    message = message_of_import(tmp_path, "")
    assert "did not find LibTorch (libtorch_cpu.so)" in message
    assert "install torch from PyPI" in message


def test_an_import_with_a_torch_that_lacks_a_function_names_the_function(tmp_path: Path) -> None:
    library = tmp_path / "libtorch_cpu.so"
    command = [
        "gcc",
        "-shared",
        "-Wl,-soname,libtorch_cpu.so",
        "-x",
        "c",
        "/dev/null",
        "-o",
        library,
    ]
    subprocess.run(command, check=True)
    message = message_of_import(tmp_path, f"import ctypes; ctypes.CDLL({str(library)!r})")
    assert re.search(r"this version of torch has no function (aoti_)?torch_\w+", message)
    assert "install a newer torch_ckpt" in message
