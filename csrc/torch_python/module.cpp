#include <pybind11/pybind11.h>

#include <string>

#include "python/errors.h"
#include "staging/device_copy.h"
#include "torch/libtorch.h"
#include "torch/scalar_type.h"
#include "torch/tensor.h"
#include "torch_python/bindings.h"

namespace py = pybind11;

namespace torch_ckpt {
namespace {

/// Uses the CUDA runtime that torch has loaded. Returns the reason if there is none that can be
/// used, otherwise an empty text.
std::string use_cuda(const py::module_& torch) {
  const py::object version = torch.attr("version").attr("cuda");  // such as "13.0", or None
  if (version.is_none()) return "this torch was built without CUDA";
  const int major = std::stoi(version.cast<std::string>());
  const std::string library = "libcudart.so." + std::to_string(major);
  const os::Lookup runtime = os::loaded_library(library);
  if (!runtime) return "torch has not loaded " + library;
  const auto used = staging::use_cuda_runtime(runtime, major);
  return used ? std::string() : std::string(used.error().message());
}

}  // namespace
}  // namespace torch_ckpt

PYBIND11_MODULE(_C, module) {
  using namespace torch_ckpt;
  module.doc() =
      "The part of the engine that accepts and returns tensors; see csrc/torch_python.\n\n"
      "It makes no decisions. Import torch first, because it needs torch's libraries.";
  // _core binds classes that functions in this module accept and return.
  py::module_::import("torch_ckpt._core");
  const auto torch = py::module_::import("torch");
  tensors::libtorch::load();
  tensors::Tensor::load();
  tensors::ScalarType::load(&tensors::Tensor::dtype_code_of);
  python::bind_errors();
  python::bind_state(module);
  python::bind_save(module);
  python::bind_load(module);
  module.attr("no_cuda_reason") = use_cuda(torch);
  module.attr("has_cuda") = staging::device_support() != nullptr;
}
