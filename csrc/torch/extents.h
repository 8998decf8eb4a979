#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace torch_ckpt::tensors {

/// Sizes, strides or offsets as the engine's unsigned type.
using Extents = std::vector<std::uint64_t>;

inline Extents unsigned_of(std::span<const std::int64_t> values) {
  return {values.begin(), values.end()};
}
inline std::vector<std::int64_t> signed_of(const Extents& values) {
  return {values.begin(), values.end()};
}

}  // namespace torch_ckpt::tensors
