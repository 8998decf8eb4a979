#pragma once

#include <pybind11/pybind11.h>

#include <utility>

#include "python/errors.h"
#include "python/released_gil.h"

namespace torch_ckpt::python {

/// Call guard for functions that run without the GIL, such as disk operations, which may take
/// seconds (unlink has to free the blocks of a large file).
using NoGil = pybind11::call_guard<ReleasedGil>;

/// Calls `function` without the GIL and returns its value. If it returns a Result, raises the
/// error.
template <class Function>
auto without_gil(Function function) {
  return unwrap([&] {
    const ReleasedGil released;
    return function();
  }());
}

}  // namespace torch_ckpt::python
