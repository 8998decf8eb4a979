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

/// Converts a torch_ckpt.saving.background.Background.
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

/// The name and checksum table of each file.
using FileRows = std::vector<std::pair<std::string, std::string>>;
inline std::vector<engine::LoadFile> files_of(FileRows& rows) {
  std::vector<engine::LoadFile> files;
  for (auto& [name, table] : rows) files.push_back({std::move(name), std::move(table)});
  return files;
}

inline void check_file(std::size_t number, const std::vector<engine::LoadFile>& files) {
  if (number >= files.size()) {
    throw pybind11::index_error("there is no file number " + std::to_string(number));
  }
}

}  // namespace torch_ckpt::python
