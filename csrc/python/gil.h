#pragma once

#include <Python.h>

#include <chrono>
#include <thread>
#include <utility>

#include "python/errors.h"

namespace torch_ckpt::python {

/// Without the GIL while it lives. If the interpreter ends meanwhile, the thread sleeps until the
/// process has ended.
class ReleasedGil {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) {}
  ~ReleasedGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      // Before 3.14 Python ends a daemon's thread here by unwinding its stack. That must not go
      // through a destructor: std::terminate would end the process.
      for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
    }
  }
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  PyThreadState* const state_;
};

/// The value of the Result of `function`, which is called without the GIL; raises its error. The
/// disk may take seconds (a large file's blocks are freed by unlink), so other threads go on.
template <class Function>
auto without_gil(Function function) {
  auto result = [&] {
    const ReleasedGil released;
    return function();
  }();
  return unwrap(std::move(result));
}

}  // namespace torch_ckpt::python
