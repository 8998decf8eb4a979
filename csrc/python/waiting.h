#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <cstdint>

#include "python/gil.h"

namespace torch_ckpt::python {

// Ends a session that reads and whose waiting was left by an exception: its threads write into
// memory that would go.
template <class Session>
class EndsSession {
 public:
  explicit EndsSession(Session& session) : session_(session) {}
  ~EndsSession() {
    const ReleasedGil released;
    if (session_.wait_for(std::chrono::milliseconds(0))) return;
    session_.cancel();
    while (!session_.wait_for(std::chrono::hours(1))) {
    }
  }
  EndsSession(const EndsSession&) = delete;
  EndsSession& operator=(const EndsSession&) = delete;

 private:
  Session& session_;
};

/// Waits with the GIL released; looks up now and then for Ctrl-C and to report progress, where
/// `progress` is not None.
template <class Session>
void wait_for(Session& session, const pybind11::object& progress, std::uint64_t done_before = 0) {
  const EndsSession<Session> guard(session);
  for (bool done = false; !done;) {
    {
      const ReleasedGil released;
      done = session.wait_for(std::chrono::milliseconds(100));
    }
    if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
    if (!progress.is_none()) progress(done_before + session.bytes_done());
  }
}

}  // namespace torch_ckpt::python
