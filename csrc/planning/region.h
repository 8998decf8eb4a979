#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace torch_ckpt::planning {

/// A run of elements in a row-major tensor.
struct Run {
  std::uint64_t begin = 0;
  std::uint64_t count = 0;
};

/// The box [offsets, offsets + lengths) within a row-major tensor of `sizes`, as one run of
/// elements where it is one (only the outermost dimension that is not 1 is narrowed); nullopt
/// otherwise or where the box does not lie within.
std::optional<Run> contiguous_run(std::span<const std::uint64_t> sizes,
                                  std::span<const std::uint64_t> offsets,
                                  std::span<const std::uint64_t> lengths);

/// Whether the box lies within the tensor.
bool box_inside(std::span<const std::uint64_t> sizes, std::span<const std::uint64_t> offsets,
                std::span<const std::uint64_t> lengths);

}  // namespace torch_ckpt::planning
