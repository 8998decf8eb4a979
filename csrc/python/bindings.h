#pragma once

#include <pybind11/pybind11.h>

namespace torch_ckpt::python {

// Bind the parts of torch_ckpt._core, the extension module that does not depend on torch.
void bind_fault(pybind11::module_& module);
void bind_directory(pybind11::module_& module);
void bind_results(pybind11::module_& module);
void bind_index(pybind11::module_& module);
void bind_read(pybind11::module_& module);
void bind_plan(pybind11::module_& module);
void bind_model(pybind11::module_& module);
void bind_pool(pybind11::module_& module);
void bind_verify(pybind11::module_& module);
void bind_store(pybind11::module_& module);

}  // namespace torch_ckpt::python
