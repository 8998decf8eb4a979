#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "planning/region.h"

namespace torch_ckpt::staging {

/// Changes `count` elements on their way to another dtype; neither pointer need be aligned.
using Convert = std::function<void(std::byte* out, const std::byte* in, std::size_t count)>;

/// Copies the elements of one run: from `in`, where the first of them lies, to `out`. Without a
/// conversion both have `item_bytes` each.
void copy_run(std::byte* out, const std::byte* in, const planning::Region::Run& run,
              std::size_t item_bytes, std::size_t target_item_bytes, const Convert& convert);

}  // namespace torch_ckpt::staging
