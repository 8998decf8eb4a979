#pragma once

#include <cstdint>
#include <optional>

namespace torch_ckpt {

// All arithmetic and range checks of untrusted offsets. A range check subtracts and never adds, so
// that it cannot overflow.

/// Returns true if [offset, offset + length) lies within [0, size).
constexpr bool inside(std::uint64_t offset, std::uint64_t length, std::uint64_t size) {
  return offset <= size && length <= size - offset;
}

inline std::optional<std::uint64_t> checked_add(std::uint64_t a, std::uint64_t b) {
  std::uint64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) return std::nullopt;
  return sum;
}

inline std::optional<std::uint64_t> checked_mul(std::uint64_t a, std::uint64_t b) {
  std::uint64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) return std::nullopt;
  return product;
}

/// Returns the number of units that hold `value`. `unit` is not 0.
constexpr std::uint64_t divide_up(std::uint64_t value, std::uint64_t unit) {
  return value / unit + (value % unit != 0 ? 1 : 0);
}

// Unchecked: for values that are known to be far from the limits. `unit` is a power of two.
constexpr std::uint64_t align_down(std::uint64_t value, std::uint64_t unit) {
  return value & ~(unit - 1);
}
constexpr std::uint64_t align_up(std::uint64_t value, std::uint64_t unit) {
  return align_down(value + unit - 1, unit);
}

}  // namespace torch_ckpt
