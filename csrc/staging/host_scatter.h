#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "planning/region.h"

namespace torch_ckpt::staging {

/// Converts `count` contiguous elements to another dtype. The pointers need not be aligned.
using Convert = std::function<void(std::byte* out, const std::byte* in, std::size_t count)>;

/// Copies the elements of one run. `in` and `out` point to its first element. If `convert` is
/// empty, the target's elements must also have `item_bytes` bytes.
void copy_run(std::byte* out, const std::byte* in, const planning::Region::Run& run,
              std::size_t item_bytes, std::size_t target_item_bytes, const Convert& convert);

}  // namespace torch_ckpt::staging
