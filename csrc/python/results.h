#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "engine/process_channel.h"
#include "format/result_frame.h"

namespace torch_ckpt::python {

/// The files that one rank has written in one save. Ranks send them to each other as frames
/// (format/result_frame.h).
struct WrittenFiles {
  explicit WrittenFiles(std::vector<format::FileResult> results);

  std::vector<format::FileResult> files;
  std::size_t items = 0;  // items of all files; their numbers are 0 to items - 1
};

/// Converts a ProcessChannel or None.
std::shared_ptr<engine::ProcessChannel> channel_of(const pybind11::object& channel);

}  // namespace torch_ckpt::python
