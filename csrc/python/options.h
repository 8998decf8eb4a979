#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "engine/load_session.h"

namespace torch_ckpt::python {

/// Converts the option direct_io: True, False or "auto".
inline engine::DirectIo direct_io_option(const pybind11::object& value) {
  if (pybind11::isinstance<pybind11::bool_>(value)) {
    return value.cast<bool>() ? engine::DirectIo::on : engine::DirectIo::off;
  }
  if (pybind11::isinstance<pybind11::str>(value) && value.cast<std::string>() == "auto") {
    return engine::DirectIo::automatic;
  }
  throw pybind11::value_error("direct_io must be True, False or \"auto\", got " +
                              std::string(pybind11::repr(value)));
}

/// Converts a torch_ckpt.options.Background.
inline engine::PoolSpec threads_of(const pybind11::handle& background) {
  engine::PoolSpec spec;
  spec.priority.nice = background.attr("nice").cast<int>();
  spec.priority.idle_io = background.attr("idle_io").cast<bool>();
  spec.count = background.attr("threads").cast<std::size_t>();
  return spec;
}

/// The CUDA device and handle of each event.
using Events = std::vector<std::pair<int, std::uintptr_t>>;
inline std::vector<staging::ReadyEvent> ready_events(const Events& events) {
  std::vector<staging::ReadyEvent> ready;
  for (const auto& [device, event] : events) {
    ready.push_back({device, reinterpret_cast<void*>(event)});
  }
  return ready;
}

/// Converts a torch_ckpt.options.ReadOptions. Its `verify` applies only to loads.
template <class Options>
Options read_options(const pybind11::handle& given) {
  Options options;
  options.threads = given.attr("threads").cast<std::size_t>();
  options.max_scratch_bytes = given.attr("max_inflight_bytes").cast<std::uint64_t>();
  options.direct_io = direct_io_option(given.attr("direct_io"));
  return options;
}

}  // namespace torch_ckpt::python
