#pragma once

#include <pybind11/pybind11.h>

#include <utility>

#include "python/errors.h"
#include "torch/gil.h"

namespace torch_ckpt::python {

using tensors::outlasting_python;
using tensors::ReleasedGil;
using tensors::TakenGil;

/// For functions that are called without the GIL. The disk may take seconds (a large file's blocks
/// are freed by unlink), so other threads go on.
using NoGil = pybind11::call_guard<ReleasedGil>;

/// What `function` returns, which is called without the GIL; raises its error where it is a Result.
template <class Function>
auto without_gil(Function function) {
  return unwrap([&] {
    const ReleasedGil released;
    return function();
  }());
}

}  // namespace torch_ckpt::python
