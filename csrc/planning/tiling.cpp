#include "planning/tiling.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <set>
#include <tuple>
#include <utility>

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

bool is_empty(std::span<const std::int64_t> sizes) {
  return std::ranges::any_of(sizes, [](std::int64_t size) { return size == 0; });
}

/// Finds the first element that no box covers.
class GapSearch {
 public:
  using Point = std::vector<std::int64_t>;

  GapSearch(std::span<const std::int64_t> whole, std::span<const Box> boxes)
      : whole_(whole),
        boxes_(boxes),
        alike_(whole.size() + 1, std::vector<std::uint32_t>(boxes.size())),
        known_(whole.size()) {
    for (std::size_t d = whole.size(); d-- > 0;) {
      std::map<std::tuple<std::int64_t, std::int64_t, std::uint32_t>, std::uint32_t> first;
      for (std::uint32_t i = 0; i < boxes.size(); ++i) {
        const std::tuple range(boxes[i].offsets[d], boxes[i].lengths[d], alike_[d + 1][i]);
        alike_[d][i] = first.try_emplace(range, i).first->second;
      }
    }
  }

  std::optional<Point> run() { return search(0, distinct(alike_[0])); }

 private:
  static std::vector<std::uint32_t> distinct(std::vector<std::uint32_t> boxes) {
    std::ranges::sort(boxes);
    boxes.erase(std::unique(boxes.begin(), boxes.end()), boxes.end());
    return boxes;
  }

  /// Searches the dimensions from `d` on, in which only these boxes count.
  std::optional<Point> search(std::size_t d, const std::vector<std::uint32_t>& boxes) {
    if (boxes.empty()) return Point(whole_.size() - d);
    if (d == whole_.size()) return std::nullopt;
    const auto [known, is_new] = known_[d].try_emplace(boxes);
    if (!is_new) return known->second;
    // Between two edges, the set of boxes is constant.
    std::set<std::int64_t> edges = {0};
    for (const std::uint32_t i : boxes) {
      edges.insert({boxes_[i].offsets[d], boxes_[i].offsets[d] + boxes_[i].lengths[d]});
    }
    edges.erase(whole_[d]);
    for (const std::int64_t edge : edges) {
      std::vector<std::uint32_t> across;
      for (const std::uint32_t i : boxes) {
        const std::int64_t begin = boxes_[i].offsets[d];
        if (begin <= edge && edge < begin + boxes_[i].lengths[d]) {
          across.push_back(alike_[d + 1][i]);
        }
      }
      if (auto gap = search(d + 1, distinct(std::move(across)))) {
        gap->insert(gap->begin(), edge);
        return known->second = std::move(gap);
      }
    }
    return std::nullopt;
  }

  std::span<const std::int64_t> whole_;
  std::span<const Box> boxes_;
  // By dimension and box: the first box with the same offsets and lengths from that dimension on.
  std::vector<std::vector<std::uint32_t>> alike_;
  std::vector<std::map<std::vector<std::uint32_t>, std::optional<Point>>> known_;  // by dimension
};

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

std::optional<std::vector<std::int64_t>> first_gap(std::span<const std::int64_t> whole,
                                                   std::vector<Box> boxes) {
  if (is_empty(whole)) return std::nullopt;
  std::erase_if(boxes, [](const Box& box) { return is_empty(box.lengths); });
  if (tile(whole, boxes)) return std::nullopt;
  return GapSearch(whole, boxes).run();
}

std::optional<std::vector<std::int64_t>> first_gap(const index::CheckpointIndex& index,
                                                   const index::CheckpointIndex::Entry& entry) {
  if (!entry.is_tensor) return std::nullopt;
  std::vector<Box> boxes;
  for (const index::CheckpointIndex::Shard& shard : index.shards(entry)) {
    const auto offsets = index.extents(shard.offsets);
    const auto sizes = index.extents(shard.sizes);
    boxes.push_back({{offsets.begin(), offsets.end()}, {sizes.begin(), sizes.end()}});
  }
  return first_gap(index.extents(entry.size), std::move(boxes));
}

}  // namespace torch_ckpt::planning
