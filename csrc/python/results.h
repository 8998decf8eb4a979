#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "engine/process_channel.h"
#include "format/result_frame.h"

namespace torch_ckpt::python {

/// What one rank has written in one save. Ranks tell each other of it as frames
/// (format/result_frame.h).
struct WrittenFiles {
  explicit WrittenFiles(std::vector<format::FileResult> results);

  std::vector<format::FileResult> files;
  std::size_t items = 0;  // all of them, by numbers below this one
};

/// From a ProcessChannel or None.
std::shared_ptr<engine::ProcessChannel> channel_of(const pybind11::object& channel);

}  // namespace torch_ckpt::python
