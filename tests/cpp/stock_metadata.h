#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "index/metadata_pickle.h"

namespace torch_ckpt::test {

// Metadata that Python has pickled for torch, and the permitted globals.
struct StockMetadata {
  std::string name;
  std::string_view pickle;
};

const std::vector<StockMetadata>& stock_metadata();
const index::Globals& stock_globals();

}  // namespace torch_ckpt::test
