"""The functions of LibTorch and of the CUDA runtime, which the extension looks up at run time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths

import torch_ckpt

REPOSITORY = Path(__file__).parents[3]
PACKAGE = Path(torch_ckpt.__file__).parent

#: Compares declarations. Pointers to incomplete classes have other names in the libraries' headers,
#: and enumerations are declared as int.
COMPARISON = """
#include <cstddef>
#include <type_traits>

template <class T>
struct Erased {
  using type = T;
};
template <class T>
  requires std::is_enum_v<T>
struct Erased<T> {
  using type = int;
};
template <class T>
  requires std::is_class_v<T>
struct Erased<T*> {
  using type = void*;
};
template <class T>
  requires std::is_pointer_v<T> || std::is_enum_v<T>
struct Erased<T*> {
  using type = typename Erased<T>::type*;
};
template <class Result, class... Arguments>
struct Erased<Result(Arguments...)> {
  using type = typename Erased<Result>::type(typename Erased<Arguments>::type...);
};
template <class T>
struct SignatureOf;
template <class Signature>
struct SignatureOf<const torch_ckpt::os::Function<Signature>> {
  using type = typename Erased<Signature>::type;
};
#define COMPARE(ours, theirs)                                                        \\
  static_assert(std::is_same_v<SignatureOf<decltype(ours)>::type,                    \\
                               Erased<std::remove_reference_t<decltype(theirs)>>::type>, #theirs)
"""

LIBTORCH = """
#define USE_CUDA
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>
#include "torch/libtorch.h"
"""

CUDA = """
#include <cuda_runtime_api.h>
#include "staging/cuda_runtime.h"
"""

#: Values and layouts of csrc/staging/cuda_runtime.h.
CUDA_CONSTANTS = """
namespace cuda = torch_ckpt::staging::cuda;
static_assert(cuda::kSuccess == cudaSuccess);
static_assert(cuda::kNotReady == cudaErrorNotReady);
static_assert(cuda::kEnableDefault == cudaEnableDefault);
static_assert(cuda::kEntryPointFound == cudaDriverEntryPointSuccess);
static_assert(cuda::kNonBlocking == cudaStreamNonBlocking);
static_assert(cuda::kBlockingSync == cudaEventBlockingSync);
static_assert(cuda::kDisableTiming == cudaEventDisableTiming);
static_assert(cuda::kNotCapturing == cudaStreamCaptureStatusNone);
static_assert(cuda::kCaptureRelaxed == cudaStreamCaptureModeRelaxed);
static_assert(cuda::kPortable == cudaHostRegisterPortable);
static_assert(cuda::kHostToDevice == cudaMemcpyHostToDevice);
static_assert(cuda::kDeviceToHost == cudaMemcpyDeviceToHost);
static_assert(cuda::kDeviceLocation == cudaMemLocationTypeDevice);
static_assert(cuda::kHostLocation == cudaMemLocationTypeHost);
static_assert(cuda::kStreamOrder == cudaMemcpySrcAccessOrderStream);
static_assert(cuda::kPreferOverlapWithCompute == cudaMemcpyFlagPreferOverlapWithCompute);
static_assert(sizeof(cuda::Location) == sizeof(cudaMemLocation));
static_assert(offsetof(cuda::Location, id) == offsetof(cudaMemLocation, id));
static_assert(sizeof(cuda::CopyAttributes) == sizeof(cudaMemcpyAttributes));
static_assert(offsetof(cuda::CopyAttributes, source) == offsetof(cudaMemcpyAttributes, srcLocHint));
static_assert(offsetof(cuda::CopyAttributes, target) == offsetof(cudaMemcpyAttributes, dstLocHint));
static_assert(offsetof(cuda::CopyAttributes, flags) == offsetof(cudaMemcpyAttributes, flags));
"""


#: The optional functions of torch, and the first version of torch that declares each one.
SINCE = {
    "torch_exception_get_what_without_backtrace": (2, 13),
    "torch_tensor_from_pyobject": (2, 14),
    "torch_tensor_to_pyobject": (2, 14),
}


def comparisons(header: str, namespace: str) -> list[str]:
    """Returns a comparison for each function that a header of ours declares and that the installed
    library has."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    text = (REPOSITORY / "csrc" / header).read_text()
    found = re.findall(r"\s(\w+)\(\s*(?:cuda_)?functions,\s*\"(\w+)\"", text)
    assert len(found) == len(
        re.findall(r"^inline const (?:Function|Getter|Constant)\b", text, re.M)
    )
    return [
        f"COMPARE(torch_ckpt::{namespace}::{ours}, {theirs});"
        for ours, theirs in found
        if version >= SINCE.get(theirs, version)
    ]


def compile_error(folder: Path, lines: list[str]) -> str:
    source = folder / "comparison.cpp"
    source.write_text("\n".join(lines))
    includes = [f"-isystem{path}" for path in include_paths("cuda")]
    command = [
        "g++",
        "-std=c++20",
        "-fsyntax-only",
        "-Wno-deprecated-declarations",
        f"-I{REPOSITORY / 'csrc'}",
        *includes,
        source,
    ]
    return subprocess.run(command, check=False, capture_output=True, text=True).stderr


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


@pytest.mark.parametrize("name", ["_C", "_core", "libtorch_ckpt_core"])
def test_no_library_needs_a_symbol_of_torch_or_cuda(name: str) -> None:
    (library,) = PACKAGE.glob(f"{name}.*so")
    symbols = undefined_symbols(library)
    assert symbols
    pattern = r"\b(?:at|c10|caffe2|torch)::|\bTHP|\baoti_torch_|\btorch_(?!ckpt)|\bcuda?[A-Z]"
    assert [symbol for symbol in symbols if re.search(pattern, symbol)] == []


def test_the_declared_functions_are_those_of_torch(tmp_path: Path) -> None:
    functions = comparisons("torch/libtorch.h", "tensors::libtorch")
    assert compile_error(tmp_path, [LIBTORCH, COMPARISON, *functions]) == ""


def test_the_declared_functions_and_constants_are_those_of_cuda(tmp_path: Path) -> None:
    if compile_error(
        tmp_path, ["#include <cuda_runtime_api.h>\nstatic_assert(CUDART_VERSION >= 13000);"]
    ):
        pytest.skip("no headers of CUDA 13")
    functions = comparisons("staging/cuda_runtime.h", "staging::cuda")
    assert compile_error(tmp_path, [CUDA, COMPARISON, *functions, CUDA_CONSTANTS]) == ""


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
