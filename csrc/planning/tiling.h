#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "index/checkpoint_index.h"

namespace torch_ckpt::planning {

/// A part of a tensor, in elements.
struct Box {
  std::vector<std::int64_t> offsets;
  std::vector<std::int64_t> lengths;
};

/// Whether boxes, none of which is empty, fill a tensor of that size, each element once; all lie
/// within it. False, too, where they are cut in more than six dimensions.
///
/// They do if, and only if, their corners cancel out but for those of the whole, where a corner
/// counts -1 for each dimension in which it is the far end. The corners are added up as 64-bit
/// hashes with a seed of the process. Unlike a comparison of all pairs this takes no longer for
/// each box where there are many.
bool tile(std::span<const std::int64_t> whole, std::span<const Box> boxes);

/// The entries whose shards do not fill their tensor, or for which that is hard to tell.
std::vector<std::uint32_t> uncovered(const index::CheckpointIndex& index);

}  // namespace torch_ckpt::planning
