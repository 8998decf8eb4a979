#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <utility>

#include "error.h"
#include "interrupt_check.h"
#include "python/errors.h"
#include "python/gil.h"

namespace torch_ckpt::python {

/// Checks for signals during a long call without the GIL. Keeps the exception that a signal
/// handler raises. The GIL must be held to construct, use and destroy an object of this class.
class Interrupts {
 public:
  InterruptCheck check() {
    return [this]() -> Result<> {
      const TakenGil taken;
      return outlasting_python([&]() -> Result<> {
        if (PyErr_CheckSignals() == 0) return {};
        raised_.emplace();
        return format_error(Errc::system, "interrupted");
      });
    };
  }
  /// Calls `function` without the GIL and returns its value. If a signal handler raised an
  /// exception, raises that exception.
  template <class Function>
  auto run(Function function) {
    auto result = [&] {
      const ReleasedGil released;
      return function();
    }();
    if (!result && raised_) throw std::move(*raised_);
    return unwrap(std::move(result));
  }

 private:
  std::optional<pybind11::error_already_set> raised_;
};

}  // namespace torch_ckpt::python
