#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "format/dtype.h"

namespace torch_ckpt::planning {

/// A record of a data file, as the metadata describes it.
struct StoredRecord {
  std::string name;          // of its value, for errors; may be empty
  std::size_t file = 0;      // number of the file
  std::uint64_t offset = 0;  // in the file
  std::uint64_t length = 0;
  bool is_tensor = false;
  const format::Dtype* dtype = nullptr;   // of a tensor; nullptr if unknown to the decoder
  std::vector<std::uint64_t> sizes = {};  // of a tensor
};

}  // namespace torch_ckpt::planning
