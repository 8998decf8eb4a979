#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "index/metadata_pickle.h"

namespace torch_ckpt::test {

// Metadata as torch's pickler writes it, and the names that it may use.
struct StockMetadata {
  std::string name;
  std::string_view pickle;
};

const std::vector<StockMetadata>& stock_metadata();
const index::Globals& stock_globals();

}  // namespace torch_ckpt::test
