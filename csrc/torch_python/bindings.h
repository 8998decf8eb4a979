#pragma once

#include <pybind11/pybind11.h>

namespace torch_ckpt::python {

// Bind the parts of torch_ckpt._C, the extension module for code that handles tensors.
void bind_state(pybind11::module_& module);
void bind_save(pybind11::module_& module);
void bind_load(pybind11::module_& module);

}  // namespace torch_ckpt::python
