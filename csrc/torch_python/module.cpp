#include <pybind11/pybind11.h>

#include "python/errors.h"
#include "staging/device_copy.h"
#include "torch/libtorch.h"
#include "torch/scalar_type.h"
#include "torch/tensor.h"
#include "torch_python/bindings.h"

namespace py = pybind11;

PYBIND11_MODULE(_C, module) {
  using namespace torch_ckpt;
  // _core binds classes that functions in this module accept and return.
  py::module_::import("torch_ckpt._core");
  py::module_::import("torch");
  tensors::libtorch::load();
  tensors::Tensor::load();
  tensors::ScalarType::load(&tensors::Tensor::dtype_code_of);
  python::bind_errors();
  python::bind_state(module);
  python::bind_save(module);
  python::bind_load(module);
  module.attr("has_cuda") = staging::device_support() != nullptr;
}
