#include "planning/tiling.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <numeric>
#include <set>
#include <utility>

#include "checked_math.h"
#include "index/extents.h"
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

using Point = std::vector<std::int64_t>;

/// How often a search checks for an interrupt, in steps.
constexpr std::uint64_t kStepsPerCheck = 65'536;

/// Counts how many boxes cover each interval between consecutive edges. A segment tree: adding a
/// box and finding the first uncovered interval take logarithmic time.
class CoverCounts {
 public:
  explicit CoverCounts(std::size_t intervals)
      : leaves_(std::bit_ceil(intervals)), added_(2 * leaves_), least_(2 * leaves_) {
    // Leaves without an interval must never be the least covered.
    if (intervals < leaves_) add(intervals, leaves_, kNever);
  }

  /// Adds `count` to the intervals [begin, end).
  void add(std::size_t begin, std::size_t end, std::int64_t count) {
    add(begin, end, count, 1, 0, leaves_);
  }

  /// Returns the first interval that no box covers.
  std::optional<std::size_t> first_uncovered() const {
    if (least_[1] > 0) return std::nullopt;
    std::size_t node = 1;
    std::int64_t above = 0;
    while (node < leaves_) {
      above += added_[node];
      node = 2 * node + (above + least_[2 * node] > 0 ? 1 : 0);
    }
    return node - leaves_;
  }

 private:
  static constexpr std::int64_t kNever = std::int64_t{1} << 48;

  void add(std::size_t begin, std::size_t end, std::int64_t count, std::size_t node,
           std::size_t first, std::size_t last) {
    if (end <= first || last <= begin) return;
    if (begin <= first && last <= end) {
      added_[node] += count;
      least_[node] += count;
      return;
    }
    const std::size_t middle = first + (last - first) / 2;
    add(begin, end, count, 2 * node, first, middle);
    add(begin, end, count, 2 * node + 1, middle, last);
    least_[node] = added_[node] + std::min(least_[2 * node], least_[2 * node + 1]);
  }

  std::size_t leaves_;
  std::vector<std::int64_t> added_;  // to all leaves below a node
  // Lowest count of a leaf below the node, without the counts added to its ancestors.
  std::vector<std::int64_t> least_;
};

/// Finds the first element that no box covers.
class GapSearch {
 public:
  /// `dims` are the dimensions that some box divides.
  GapSearch(std::span<const std::int64_t> whole, std::span<const std::size_t> dims,
            std::span<const Box> boxes, const InterruptCheck& check_interrupt)
      : whole_(whole),
        dims_(dims),
        boxes_(boxes),
        check_interrupt_(check_interrupt),
        max_steps_(max_coverage_steps(boxes.size())) {}

  /// Returns nullopt if there is none, or if has_reached_limit().
  Result<std::optional<Point>> run() {
    std::vector<std::uint32_t> all(boxes_.size());
    std::iota(all.begin(), all.end(), 0);
    gap_.assign(whole_.size(), 0);
    auto found = search(0, std::move(all));
    if (!found) return found.error();
    return *found ? std::optional(std::move(gap_)) : std::nullopt;
  }

  bool has_reached_limit() const { return steps_ >= max_steps_; }
  std::uint64_t steps() const { return steps_; }

 private:
  struct Event {
    std::int64_t at;
    std::uint32_t box;
    bool is_end;
  };

  std::int64_t begin(std::uint32_t box, std::size_t level) const {
    return boxes_[box].offsets[dims_[level]];
  }
  std::int64_t end(std::uint32_t box, std::size_t level) const {
    return begin(box, level) + boxes_[box].lengths[dims_[level]];
  }

  Result<> count_step() {
    if (++steps_ % kStepsPerCheck == 0) return check_interrupt_();
    return {};
  }

  /// Searches the dimensions from dims_[level] on, in which only these boxes count. Stores the
  /// element in gap_ and returns true if there is one.
  Result<bool> search(std::size_t level, std::vector<std::uint32_t> boxes) {
    if (boxes.empty()) {
      for (const std::size_t dim : dims_.subspan(level)) gap_[dim] = 0;
      return true;
    }
    switch (dims_.size() - level) {
      case 0:
        return false;
      case 1:
        return search_line(level, std::move(boxes));
      case 2:
        return sweep_plane(level, boxes);
      default:
        return search_slabs(level, boxes);
    }
  }

  Result<bool> search_line(std::size_t level, std::vector<std::uint32_t> boxes) {
    std::ranges::sort(boxes, {}, [&](std::uint32_t box) { return begin(box, level); });
    std::int64_t covered = 0;
    for (const std::uint32_t box : boxes) {
      TC_TRY(count_step());
      if (begin(box, level) > covered) break;
      covered = std::max(covered, end(box, level));
    }
    gap_[dims_[level]] = covered;
    return covered < whole_[dims_[level]];
  }

  /// Sweeps a line along the first of two dimensions. The line is divided at the boxes' edges.
  Result<bool> sweep_plane(std::size_t level, std::span<const std::uint32_t> boxes) {
    const std::vector<std::int64_t> edges = edges_of(level + 1, boxes);
    CoverCounts counts(edges.size());
    const auto interval = [&](std::int64_t edge) {
      return static_cast<std::size_t>(std::ranges::lower_bound(edges, edge) - edges.begin());
    };
    return sweep(
        level, boxes,
        [&](std::uint32_t box, bool is_end) {
          counts.add(interval(begin(box, level + 1)), interval(end(box, level + 1)),
                     is_end ? -1 : 1);
        },
        [&]() -> Result<bool> {
          const auto uncovered = counts.first_uncovered();
          if (uncovered) gap_[dims_[level + 1]] = edges[*uncovered];
          return uncovered.has_value();
        });
  }

  /// Searches the slab after each edge of the first dimension.
  Result<bool> search_slabs(std::size_t level, std::span<const std::uint32_t> boxes) {
    std::set<std::uint32_t> across;
    return sweep(
        level, boxes,
        [&](std::uint32_t box, bool is_end) {
          if (is_end) {
            across.erase(box);
          } else {
            across.insert(box);
          }
        },
        [&] {
          return search(level + 1, {across.begin(), across.end()});
        });
  }

  /// Calls `change` for each box that begins or ends at an edge of the dimension, then `find` for
  /// the slab after that edge. Ends at the first slab with a gap.
  template <class Change, class Find>
  Result<bool> sweep(std::size_t level, std::span<const std::uint32_t> boxes, const Change& change,
                     const Find& find) {
    std::vector<Event> events;
    events.reserve(2 * boxes.size());
    for (const std::uint32_t box : boxes) {
      events.push_back({begin(box, level), box, false});
      events.push_back({end(box, level), box, true});
    }
    std::ranges::sort(events, {}, &Event::at);
    std::int64_t edge = 0;
    for (auto event = events.begin(); edge < whole_[dims_[level]];) {
      for (; event != events.end() && event->at == edge; ++event) {
        TC_TRY(count_step());
        if (has_reached_limit()) return false;
        change(event->box, event->is_end);
      }
      const auto found = find();
      if (!found) return found.error();
      if (*found) {
        gap_[dims_[level]] = edge;
        return true;
      }
      if (has_reached_limit()) return false;
      // If the slab is covered, a box ends after it.
      edge = event->at;
    }
    return false;
  }

  /// Returns the positions at which intervals between the boxes' edges begin.
  std::vector<std::int64_t> edges_of(std::size_t level,
                                     std::span<const std::uint32_t> boxes) const {
    std::vector<std::int64_t> edges = {0};
    for (const std::uint32_t box : boxes) {
      edges.push_back(begin(box, level));
      edges.push_back(end(box, level));
    }
    std::ranges::sort(edges);
    edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
    if (edges.back() == whole_[dims_[level]]) edges.pop_back();
    return edges;
  }

  std::span<const std::int64_t> whole_;
  std::span<const std::size_t> dims_;
  std::span<const Box> boxes_;
  const InterruptCheck& check_interrupt_;
  const std::uint64_t max_steps_;
  std::uint64_t steps_ = 0;
  Point gap_;
};

/// Returns the dimensions that some box divides.
std::vector<std::size_t> divided_dims(std::span<const std::int64_t> whole,
                                      std::span<const Box> boxes) {
  std::vector<std::size_t> dims;
  for (std::size_t d = 0; d < whole.size(); ++d) {
    const bool is_divided =
        std::ranges::any_of(boxes, [&](const Box& box) { return box.lengths[d] != whole[d]; });
    if (is_divided) dims.push_back(d);
  }
  return dims;
}

std::optional<std::uint64_t> elements(std::span<const std::int64_t> sizes) {
  std::optional<std::uint64_t> product = 1;
  for (const std::int64_t size : sizes) {
    if (product) product = checked_mul(*product, static_cast<std::uint64_t>(size));
  }
  return product;
}

/// Returns true if distinct boxes have too few elements in total to cover the tensor. `may_tile` is
/// false if it is known that they do not cover each element exactly once.
bool have_too_few_elements(std::span<const std::int64_t> whole, std::span<const Box> boxes,
                           bool may_tile) {
  const auto wanted = elements(whole);
  std::optional<std::uint64_t> sum = 0;
  for (const Box& box : boxes) {
    const auto more = elements(box.lengths);
    sum = sum && more ? checked_add(*sum, *more) : std::nullopt;
  }
  return wanted && sum && (may_tile ? *sum < *wanted : *sum <= *wanted);
}

}  // namespace

bool tile(std::span<const std::int64_t> whole, std::span<const Box> boxes) {
  const std::vector<std::size_t> cut = divided_dims(whole, boxes);
  if (cut.size() > kMaxDividedDims) return false;
  if (cut.empty()) return boxes.size() == 1;
  const std::vector<std::int64_t> zeros(whole.size());
  std::uint64_t sum = 0;
  for (const Box& box : boxes) sum += sum_of_corners(cut, box.offsets, box.lengths);
  return sum == sum_of_corners(cut, zeros, whole);
}

Result<Coverage> check_coverage(std::span<const std::int64_t> whole, std::vector<Box> boxes,
                                const InterruptCheck& check_interrupt) {
  Coverage coverage;
  if (is_empty(whole)) return coverage;
  std::erase_if(boxes, [](const Box& box) { return is_empty(box.lengths); });
  if (tile(whole, boxes)) return coverage;
  if (boxes.empty()) {
    coverage.state = Coverage::State::incomplete;
    coverage.first_gap = Point(whole.size());
    return coverage;
  }
  std::ranges::sort(boxes);
  boxes.erase(std::unique(boxes.begin(), boxes.end()), boxes.end());
  if (tile(whole, boxes)) return coverage;
  const std::vector<std::size_t> dims = divided_dims(whole, boxes);
  const bool may_tile = dims.size() > kMaxDividedDims;  // too many for tile()
  GapSearch search(whole, dims, boxes, check_interrupt);
  auto gap = search.run();
  if (!gap) return gap.error();
  coverage.steps = search.steps();
  coverage.first_gap = std::move(*gap);
  if (coverage.first_gap || have_too_few_elements(whole, boxes, may_tile)) {
    coverage.state = Coverage::State::incomplete;
  } else if (search.has_reached_limit()) {
    coverage.state = Coverage::State::undecided;
  }
  return coverage;
}

Result<Coverage> check_coverage(const index::CheckpointIndex& index, std::uint32_t number,
                                const InterruptCheck& check_interrupt) {
  if (number % kEntriesPerCheck == 0) {
    TC_TRY(check_interrupt());
  }
  const index::CheckpointIndex::Entry& entry = index.entries()[number];
  if (!entry.is_tensor) return Coverage();
  std::vector<Box> boxes;
  boxes.reserve(entry.shard_count);
  for (const index::CheckpointIndex::Shard& shard : index.shards(entry)) {
    const auto offsets = index.extents(shard.offsets);
    const auto sizes = index.extents(shard.sizes);
    boxes.push_back({{offsets.begin(), offsets.end()}, {sizes.begin(), sizes.end()}});
  }
  return check_coverage(index.extents(entry.size), std::move(boxes), check_interrupt);
}

std::string describe(const Coverage& coverage, std::size_t shards,
                     std::span<const std::int64_t> offsets) {
  if (shards == 0) return "the tensor has no shards";
  if (coverage.state == Coverage::State::undecided) {
    return "its " + std::to_string(shards) +
           " shards overlap in too many ways to check that they cover the tensor";
  }
  if (!coverage.first_gap) {
    return "its " + std::to_string(shards) + " shards do not cover the tensor";
  }
  Point gap = *coverage.first_gap;
  for (std::size_t d = 0; d < offsets.size(); ++d) gap[d] += offsets[d];
  return "no shard covers the element at " + index::listed(gap);
}

}  // namespace torch_ckpt::planning
