#pragma once

#include <Python.h>

#include <chrono>
#include <exception>
#include <thread>

#include "os/call_time.h"

namespace torch_ckpt::python {

/// Calls `call`, which takes the GIL or runs Python code, and returns its value. If the interpreter
/// shuts down meanwhile, the thread sleeps until the process exits.
template <class Call>
auto outlasting_python(Call call) {
  try {
    return call();
  } catch (const std::exception&) {
    throw;
  } catch (...) {
    // Before 3.14, Python ends a daemon thread in `call` by unwinding its stack. This must not
    // reach a destructor: it could terminate the process, or release an object without the GIL.
    for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
  }
}

inline void take_gil(PyThreadState* state) {
  outlasting_python([state] { PyEval_RestoreThread(state); });
}

/// Releases the GIL for its lifetime. os::CallTime counts the CPU time used meanwhile.
class ReleasedGil {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) { os::CallTime::begin(); }
  ~ReleasedGil() {
    os::CallTime::end();
    take_gil(state_);
  }
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  PyThreadState* const state_;
};

/// Takes the GIL back for its lifetime, on a thread with a ReleasedGil.
class TakenGil {
 public:
  TakenGil() {
    os::CallTime::end();
    take_gil(PyGILState_GetThisThreadState());
  }
  ~TakenGil() {
    PyEval_SaveThread();
    os::CallTime::begin();
  }
  TakenGil(const TakenGil&) = delete;
  TakenGil& operator=(const TakenGil&) = delete;
};

/// Holds the GIL for its lifetime, on any thread, whether or not the thread already holds it.
class EnsuredGil {
 public:
  EnsuredGil() : state_(outlasting_python([] { return PyGILState_Ensure(); })) {}
  ~EnsuredGil() { PyGILState_Release(state_); }
  EnsuredGil(const EnsuredGil&) = delete;
  EnsuredGil& operator=(const EnsuredGil&) = delete;

 private:
  const PyGILState_STATE state_;
};

}  // namespace torch_ckpt::python
