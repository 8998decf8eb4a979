#include "planning/strides.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>

namespace torch_ckpt::planning {
namespace {

bool is_empty(Geometry sizes) { return std::ranges::find(sizes, 0) != sizes.end(); }

enum class Order : std::uint8_t { as_is, reversed, unknown };

// Compares two dimensions, of which the first shall be the inner one.
Order order_of(std::size_t inner, std::size_t outer, Geometry sizes, Geometry strides) {
  // A repeated dimension has no place of its own.
  if (strides[inner] == 0 || strides[outer] == 0) return Order::unknown;
  if (strides[inner] < strides[outer]) return Order::as_is;
  if (strides[inner] > strides[outer]) return Order::reversed;
  return sizes[inner] > sizes[outer] ? Order::reversed : Order::unknown;
}

}  // namespace

std::vector<std::int64_t> row_major_strides(Geometry sizes) {
  std::vector<std::int64_t> strides(sizes.size());
  std::int64_t next = 1;
  for (std::size_t d = sizes.size(); d-- > 0;) {
    strides[d] = next;
    next *= std::max<std::int64_t>(sizes[d], 1);
  }
  return strides;
}

bool is_contiguous(Geometry sizes, Geometry strides) {
  if (is_empty(sizes)) return true;
  std::int64_t expected = 1;
  for (std::size_t d = sizes.size(); d-- > 0;) {
    if (sizes[d] == 1) continue;
    if (strides[d] != expected) return false;
    expected *= sizes[d];
  }
  return true;
}

bool is_dense(Geometry sizes, Geometry strides) {
  if (is_empty(sizes)) return true;
  std::vector<std::size_t> dims;
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] != 1) dims.push_back(d);
  }
  std::ranges::sort(dims, [&](std::size_t a, std::size_t b) { return strides[a] < strides[b]; });
  std::int64_t expected = 1;
  for (const std::size_t d : dims) {
    if (strides[d] != expected) return false;
    expected *= sizes[d];
  }
  return true;
}

bool is_repeated(Geometry sizes, Geometry strides) {
  if (is_empty(sizes)) return false;
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    if (strides[d] == 0 && sizes[d] > 1) return true;
  }
  return false;
}

std::vector<std::int64_t> dense_strides(Geometry sizes, Geometry strides) {
  // An insertion sort, because unknown orders make this a partial order: a dimension moves outwards
  // past all dimensions that must be inside of it, also beyond those that cannot be compared.
  std::vector<std::size_t> inner_first(sizes.size());
  std::iota(inner_first.rbegin(), inner_first.rend(), std::size_t{0});
  for (std::size_t i = 1; i < inner_first.size(); ++i) {
    std::size_t at = i;
    for (std::size_t before = i; before-- > 0;) {
      const Order order = order_of(inner_first[before], inner_first[at], sizes, strides);
      if (order == Order::as_is) break;
      if (order == Order::unknown) continue;
      std::swap(inner_first[before], inner_first[at]);
      at = before;
    }
  }
  std::vector<std::int64_t> dense(sizes.size());
  std::int64_t next = 1;
  for (const std::size_t d : inner_first) {
    dense[d] = next;
    if (sizes[d] > 1) next *= sizes[d];
  }
  return dense;
}

}  // namespace torch_ckpt::planning
