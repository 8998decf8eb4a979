#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <cstdint>

#include "engine/end_session.h"
#include "python/errors.h"
#include "python/gil.h"
#include "python/options.h"

namespace torch_ckpt::python {

/// Waits without the GIL until a load or verify session ends. Every 100 ms, takes the GIL, handles
/// signals (Ctrl-C) and calls `progress` unless it is None.
template <class Session>
void wait_for(Session& session, const Progress& progress, std::uint64_t done_before = 0) {
  try {
    for (bool done = false; !done;) {
      done = session.wait_for(std::chrono::milliseconds(100));
      const TakenGil taken;
      if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
      if (!progress.is_none()) progress(done_before + session.bytes_done());
      if (done) pass_on_warnings();
    }
  } catch (...) {
    // End the session before unwinding, which releases memory that the session's threads write to.
    engine::end_session(session);
    throw;
  }
}

}  // namespace torch_ckpt::python
