#pragma once

#include <string>

#include "error.h"
#include "os/fault.h"
#include "python/released_gil.h"

namespace torch_ckpt::python {

/// A fault point (os/fault.h) in code that holds the GIL. Throws Failure if a test makes it fail.
inline void fault_point(const std::string& operation, const std::string& path) {
  if (!os::ScopedFaultHook::is_installed()) return;
  const int number = [&] {
    const ReleasedGil released;
    return os::injected_fault(operation, path);
  }();
  if (number != 0) throw Failure(system_error(number, operation, path));
}

}  // namespace torch_ckpt::python
