#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "engine/process_channel.h"
#include "format/result_frame.h"

namespace torch_ckpt::python {

/// Of each item, by its number in the plan, (file name, offset, length, payload CRC-32); and the
/// checksum table of each file, by its name.
pybind11::tuple to_python(const std::vector<format::FileResult>& results);

/// From a ProcessChannel or None.
std::shared_ptr<engine::ProcessChannel> channel_of(const pybind11::object& channel);

}  // namespace torch_ckpt::python
