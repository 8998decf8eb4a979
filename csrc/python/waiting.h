#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <cstdint>

#include "engine/end_session.h"
#include "python/errors.h"
#include "python/gil.h"

namespace torch_ckpt::python {

/// Waits, without the GIL, for the end of a session that reads. Every 100 ms it takes the GIL,
/// handles signals (Ctrl-C) and calls `progress`, unless that is None.
template <class Session>
void wait_for(Session& session, const pybind11::object& progress, std::uint64_t done_before = 0) {
  try {
    for (bool done = false; !done;) {
      done = session.wait_for(std::chrono::milliseconds(100));
      const TakenGil taken;
      if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
      if (!progress.is_none()) progress(done_before + session.bytes_done());
      if (done) pass_on_warnings();
    }
  } catch (...) {
    // Ends the session first, because its threads write into memory that unwinding releases.
    engine::end_session(session);
    throw;
  }
}

}  // namespace torch_ckpt::python
