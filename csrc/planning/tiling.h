#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "index/checkpoint_index.h"

namespace torch_ckpt::planning {

/// A part of a tensor, in elements.
struct Box {
  std::vector<std::int64_t> offsets;
  std::vector<std::int64_t> lengths;
};

/// Returns true if the boxes cover each element of a tensor exactly once. No box may be empty, and
/// all must lie within the tensor. Also returns false if they divide more than six dimensions.
///
/// The boxes cover the tensor if and only if the signed sum of all their corners equals the sum of
/// the tensor's corners. A corner counts as negative if it is at the far end in an odd number of
/// dimensions. Corners are summed as 64-bit hashes with a per-process seed. The time is linear in
/// the number of boxes; comparing all pairs would take quadratic time.
bool tile(std::span<const std::int64_t> whole, std::span<const Box> boxes);

/// Returns the first element of a tensor, in row-major order, that no box covers, or nullopt if
/// there is none. Boxes may overlap or be empty, and must lie within the tensor.
std::optional<std::vector<std::int64_t>> first_gap(std::span<const std::int64_t> whole,
                                                   std::vector<Box> boxes);

/// Returns the first element of a stored tensor that no shard covers. Returns nullopt if there is
/// none, or if the entry is an object.
std::optional<std::vector<std::int64_t>> first_gap(const index::CheckpointIndex& index,
                                                   const index::CheckpointIndex::Entry& entry);

}  // namespace torch_ckpt::planning
