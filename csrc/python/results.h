#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "engine/process_channel.h"
#include "format/result_frame.h"

namespace torch_ckpt::python {

/// The files that one rank has written for one save. Ranks exchange them as frames
/// (format/result_frame.h).
struct WrittenFiles {
  std::vector<format::FileResult> files;
};

}  // namespace torch_ckpt::python
