#pragma once

#include <Python.h>

#include <chrono>
#include <exception>
#include <thread>

namespace torch_ckpt::tensors {

/// What `call` returns, which takes the GIL or runs Python code. If the interpreter ends meanwhile,
/// the thread sleeps until the process has ended.
template <class Call>
auto outlasting_python(Call call) {
  try {
    return call();
  } catch (const std::exception&) {
    throw;
  } catch (...) {
    // Before 3.14 Python ends a daemon's thread in `call` by unwinding its stack. That must not go
    // through a destructor: std::terminate would end the process, or an object be let go of without
    // the GIL.
    for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
  }
}

inline void take_gil(PyThreadState* state) {
  outlasting_python([state] { PyEval_RestoreThread(state); });
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
