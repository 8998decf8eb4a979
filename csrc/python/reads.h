#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "engine/limited_loads.h"
#include "os/directory.h"
#include "python/options.h"
#include "python/waiting.h"

namespace torch_ckpt::python {

/// Converts an offset or length from the metadata, which may be damaged or malicious.
inline std::uint64_t number_of(const pybind11::object& value, const std::string& name,
                               const char* what) {
  const std::uint64_t number =
      PyLong_Check(value.ptr()) ? PyLong_AsUnsignedLongLong(value.ptr()) : std::uint64_t(-1);
  if (number != std::uint64_t(-1)) return number;
  PyErr_Clear();
  throw Failure(format_error(Errc::range_past_end, name + ": the metadata has an invalid " + what +
                                                       ": " +
                                                       pybind11::repr(value).cast<std::string>()));
}

inline engine::LimitedLoads loads_of(const os::Directory& directory,
                                     std::vector<engine::LoadFile> files, std::size_t threads,
                                     std::uint64_t max_inflight_bytes,
                                     const pybind11::object& direct_io, bool verify,
                                     const pybind11::object& progress, const Events& ready) {
  engine::LoadOptions options;
  options.threads = threads;
  options.max_scratch_bytes = max_inflight_bytes;
  options.direct_io = direct_io_option(direct_io);
  options.verify = verify;
  options.ready = ready_events(ready);
  return unwrap(engine::LimitedLoads::make(
      engine::Context::process(), directory, std::move(files), options,
      [&progress](engine::LoadSession& session, std::uint64_t done_before) {
        wait_for(session, progress, done_before);
      }));
}

}  // namespace torch_ckpt::python
