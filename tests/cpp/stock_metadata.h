#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "index/allowed_globals.h"

namespace torch_ckpt::test {

// Metadata that Python has pickled for torch.
struct StockMetadata {
  std::string name;
  std::string_view pickle;
};

const std::vector<StockMetadata>& stock_metadata();

inline const index::Globals& stock_globals() {
  static const auto kGlobals = index::allowed_globals();
  return *kGlobals;
}

}  // namespace torch_ckpt::test
