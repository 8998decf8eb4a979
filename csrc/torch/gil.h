#pragma once

#include <Python.h>

#include <chrono>
#include <thread>

namespace torch_ckpt::tensors {

/// If the interpreter ends meanwhile, the thread sleeps until the process has ended.
inline void take_gil(PyThreadState* state) {
  try {
    PyEval_RestoreThread(state);
  } catch (...) {
    // Before 3.14 Python ends a daemon's thread here by unwinding its stack. That must not go
    // through a destructor: std::terminate would end the process.
    for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
  }
}

/// Without the GIL while it lives.
class ReleasedGil {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) {}
  ~ReleasedGil() { take_gil(state_); }
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  PyThreadState* const state_;
};

/// With the GIL again while it lives, on a thread that has a ReleasedGil.
class TakenGil {
 public:
  TakenGil() { take_gil(PyGILState_GetThisThreadState()); }
  ~TakenGil() { PyEval_SaveThread(); }
  TakenGil(const TakenGil&) = delete;
  TakenGil& operator=(const TakenGil&) = delete;
};

}  // namespace torch_ckpt::tensors
