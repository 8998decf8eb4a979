#include "planning/tiling.h"

#include <algorithm>
#include <cstddef>

#include "seeded_hash.h"

namespace torch_ckpt::planning {
namespace {

// A box divided in n dimensions has 2^n corners, so n is limited. Real tensors are divided in few
// dimensions.
constexpr std::size_t kMaxDividedDims = 6;

/// Returns the signed sum of the hashes of a box's corners in the dimensions `dims`.
std::uint64_t sum_of_corners(std::span<const std::size_t> dims,
                             std::span<const std::int64_t> begins,
                             std::span<const std::int64_t> lengths) {
  std::uint64_t sum = 0;
  std::int64_t corner[kMaxDividedDims];
  for (std::size_t ends = 0; ends < std::size_t{1} << dims.size(); ++ends) {
    bool is_negative = false;
    for (std::size_t i = 0; i < dims.size(); ++i) {
      const bool is_end = ((ends >> i) & 1) != 0;
      corner[i] = begins[dims[i]] + (is_end ? lengths[dims[i]] : 0);
      is_negative = is_negative != is_end;
    }
    const std::uint64_t hash = SeededHash()(std::span<const std::int64_t>(corner, dims.size()));
    sum += is_negative ? -hash : hash;
  }
  return sum;
}

}  // namespace

bool tile(std::span<const std::int64_t> whole, std::span<const Box> boxes) {
  std::vector<std::size_t> cut;
  for (std::size_t d = 0; d < whole.size(); ++d) {
    const bool is_cut =
        std::ranges::any_of(boxes, [&](const Box& box) { return box.lengths[d] != whole[d]; });
    if (is_cut) cut.push_back(d);
  }
  if (cut.size() > kMaxDividedDims) return false;
  if (cut.empty()) return boxes.size() == 1;
  const std::vector<std::int64_t> zeros(whole.size());
  std::uint64_t sum = 0;
  for (const Box& box : boxes) sum += sum_of_corners(cut, box.offsets, box.lengths);
  return sum == sum_of_corners(cut, zeros, whole);
}

std::vector<std::uint32_t> uncovered(const index::CheckpointIndex& index) {
  const auto is_empty = [](std::span<const std::int64_t> sizes) {
    return std::ranges::any_of(sizes, [](std::int64_t size) { return size == 0; });
  };
  std::vector<std::uint32_t> found;
  std::vector<Box> boxes;
  for (std::uint32_t number = 0; number < index.entries().size(); ++number) {
    const index::CheckpointIndex::Entry& entry = index.entries()[number];
    if (!entry.is_tensor || is_empty(index.extents(entry.size))) continue;
    boxes.clear();
    for (const index::CheckpointIndex::Shard& shard : index.shards(entry)) {
      const auto offsets = index.extents(shard.offsets);
      const auto sizes = index.extents(shard.sizes);
      if (is_empty(sizes)) continue;
      boxes.push_back({{offsets.begin(), offsets.end()}, {sizes.begin(), sizes.end()}});
    }
    if (!tile(index.extents(entry.size), boxes)) found.push_back(number);
  }
  return found;
}

}  // namespace torch_ckpt::planning
