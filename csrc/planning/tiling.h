#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "error.h"
#include "index/checkpoint_index.h"
#include "interrupt_check.h"

namespace torch_ckpt::planning {

/// A part of a tensor, in elements.
struct Box {
  std::vector<std::int64_t> offsets;
  std::vector<std::int64_t> lengths;

  auto operator<=>(const Box&) const = default;
};

/// Returns true if the boxes cover each element of a tensor exactly once. No box may be empty, and
/// all must lie within the tensor. Also returns false if they divide more than six dimensions.
///
/// The boxes cover the tensor if and only if the signed sum of all their corners equals the sum of
/// the tensor's corners. A corner counts as negative if it is at the far end in an odd number of
/// dimensions. Corners are summed as 64-bit hashes with a per-process seed. The time is linear in
/// the number of boxes; comparing all pairs would take quadratic time.
bool tile(std::span<const std::int64_t> whole, std::span<const Box> boxes);

/// How boxes cover a tensor.
struct Coverage {
  enum class State {
    complete,
    incomplete,  // no box covers some element
    undecided,   // the boxes overlap, and the search ended at its limit
  };
  State state = State::complete;
  /// The first element, in row-major order, that no box covers; only if the state is incomplete.
  /// nullopt if the search ended at its limit before it found the element.
  std::optional<std::vector<std::int64_t>> first_gap;
  /// Number of times that the search added a box to a sweep or removed it.
  std::uint64_t steps = 0;
};

/// Returns the largest number of steps of check_coverage().
constexpr std::uint64_t max_coverage_steps(std::size_t boxes) { return 65'536 + 64 * boxes; }

/// Checks that boxes cover a tensor. Boxes may overlap or be empty, and must lie within the tensor.
///
/// Takes O(n log n) time for n boxes. Only for boxes that divide three or more dimensions may the
/// number of steps reach the limit. Fails only with the error of `check_interrupt`, which is called
/// regularly.
Result<Coverage> check_coverage(std::span<const std::int64_t> whole, std::vector<Box> boxes,
                                const InterruptCheck& check_interrupt);

/// How often a caller that checks all entries of an index checks for an interrupt.
inline constexpr std::uint32_t kEntriesPerCheck = 1024;

/// Checks that the shards of the entry with this number cover it. An object is always covered.
/// Calls `check_interrupt` also if the number is a multiple of kEntriesPerCheck.
Result<Coverage> check_coverage(const index::CheckpointIndex& index, std::uint32_t number,
                                const InterruptCheck& check_interrupt);

/// Describes an incomplete or undecided coverage by `shards` boxes. `offsets` is the position of
/// the covered part in the tensor; empty for the whole tensor.
std::string describe(const Coverage& coverage, std::size_t shards,
                     std::span<const std::int64_t> offsets = {});

}  // namespace torch_ckpt::planning
