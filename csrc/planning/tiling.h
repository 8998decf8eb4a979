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

/// True if the boxes cover a tensor of this size, each element exactly once. No box may be empty,
/// and all must lie within the tensor. Also returns false if they divide more than six dimensions.
///
/// The boxes cover the tensor if and only if the signed sum of all their corners equals that of the
/// tensor. The sign of a corner is negative if it is the far end in an odd number of dimensions.
/// Corners are summed as 64-bit hashes with a seed of the process. The time is linear in the number
/// of boxes; a comparison of all pairs would be quadratic.
bool tile(std::span<const std::int64_t> whole, std::span<const Box> boxes);

/// The entries whose shards do not cover their tensor, or for which tile() cannot decide it.
std::vector<std::uint32_t> uncovered(const index::CheckpointIndex& index);

}  // namespace torch_ckpt::planning
