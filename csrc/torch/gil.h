#pragma once

#include <Python.h>
#include <time.h>

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

/// The processor time of this thread while it did not hold the GIL, as far as that is let go of
/// here, in seconds.
class FreeTime {
 public:
  static double seconds() { return seconds_; }

 private:
  friend class ReleasedGil;
  friend class TakenGil;

  static double now() {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  }
  static void begin() { seconds_ -= now(); }
  static void end() { seconds_ += now(); }

  static inline thread_local double seconds_ = 0;
};

/// Without the GIL while it lives.
class ReleasedGil {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) { FreeTime::begin(); }
  ~ReleasedGil() {
    FreeTime::end();
    take_gil(state_);
  }
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  PyThreadState* const state_;
};

/// With the GIL again while it lives, on a thread that has a ReleasedGil.
class TakenGil {
 public:
  TakenGil() {
    FreeTime::end();
    take_gil(PyGILState_GetThisThreadState());
  }
  ~TakenGil() {
    PyEval_SaveThread();
    FreeTime::begin();
  }
  TakenGil(const TakenGil&) = delete;
  TakenGil& operator=(const TakenGil&) = delete;
};

}  // namespace torch_ckpt::tensors
