#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace torch_ckpt::planning {

/// Bytes [begin, end) of a payload.
struct ByteRange {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;

  std::uint64_t bytes() const { return end - begin; }
  bool operator==(const ByteRange&) const = default;
};

/// Merges ranges that overlap or have a gap of at most `gap_bytes`. The ranges need not be sorted.
std::vector<ByteRange> coalesce(std::vector<ByteRange> ranges, std::uint64_t gap_bytes);

/// Maps a box of elements in a stored tensor to positions in a target, as nested loops over bytes
/// of the payload and the target. Parameters named sizes, offsets, lengths and strides are in
/// elements; all members and results are in bytes.
class Region {
 public:
  struct Dim {
    std::uint64_t count = 0;
    std::uint64_t stored_stride = 0;
    std::int64_t target_stride = 0;
  };
  /// A run of elements with fixed strides.
  struct Run {
    std::uint64_t stored = 0;  // offset of the first element in the payload
    std::int64_t target = 0;   // offset of the first element in the target
    std::uint64_t count = 0;
    std::uint64_t stored_stride = 0;
    std::int64_t target_stride = 0;
  };

  Region() = default;

  /// Maps the payload's bytes [begin, begin + bytes) to the target's [0, bytes).
  static Region of_bytes(std::uint64_t begin, std::uint64_t bytes);

  /// Maps the box [offsets, offsets + lengths) of a tensor of `sizes`. Empty `stored_strides` mean
  /// row-major. Returns nullopt if the box does not lie within the tensor, if its size overflows,
  /// or if stored elements may overlap.
  static std::optional<Region> of_box(std::span<const std::uint64_t> sizes,
                                      std::span<const std::uint64_t> stored_strides,
                                      std::span<const std::uint64_t> offsets,
                                      std::span<const std::uint64_t> lengths,
                                      std::span<const std::int64_t> target_strides,
                                      std::size_t item_bytes, std::size_t target_item_bytes);

  /// Size of the elements in the payload, in bytes.
  std::uint64_t bytes() const { return elements_ * item_bytes_; }
  std::uint64_t elements() const { return elements_; }
  std::size_t item_bytes() const { return item_bytes_; }
  std::size_t target_item_bytes() const { return target_item_bytes_; }

  /// Returns the range from the first to the last requested byte of the payload.
  ByteRange covering() const { return {begin_, begin_ + (elements_ == 0 ? 0 : extent(0))}; }

  /// Returns true if the region is contiguous in payload and target, so that byte
  /// covering().begin + i of the payload is byte i of the target.
  bool is_one_run() const {
    return elements_ == 0 || (dims_.size() == 1 && dims_[0].stored_stride == item_bytes_ &&
                              dims_[0].target_stride == static_cast<std::int64_t>(item_bytes_) &&
                              item_bytes_ == target_item_bytes_);
  }

  /// Returns the requested bytes as ranges, in ascending order. The ranges include gaps of at most
  /// `gap_bytes`, and larger gaps if there would otherwise be more than `max_ranges` ranges.
  std::vector<ByteRange> ranges(std::uint64_t gap_bytes, std::size_t max_ranges) const;

  /// Calls visit(const Run&) for each run of elements in the window, in ascending order. The window
  /// must not begin or end within an element.
  template <class Visit>
  void for_each_run(const ByteRange& window, Visit&& visit) const {
    if (elements_ > 0) walk(0, begin_, 0, window, visit);
  }

 private:
  /// Number of payload bytes that loop `dim` and the loops inside it span.
  std::uint64_t extent(std::size_t dim) const { return extents_[dim]; }

  template <class Visit>
  void walk(std::size_t dim, std::uint64_t stored, std::int64_t target, const ByteRange& window,
            Visit& visit) const {
    const Dim& d = dims_[dim];
    const std::uint64_t inner = extent(dim + 1);
    // Block i has `inner` bytes at stored + i * stride. Blocks [first, last) intersect the window.
    std::uint64_t first = 0;
    if (window.begin > stored && window.begin - stored >= inner) {
      first = (window.begin - stored - inner) / d.stored_stride + 1;
    }
    if (window.end <= stored) return;
    const std::uint64_t last =
        std::min(d.count, (window.end - stored - 1) / d.stored_stride + 1);  // exclusive
    if (first >= last) return;
    if (dim + 1 == dims_.size()) {
      visit(Run{stored + first * d.stored_stride,
                target + static_cast<std::int64_t>(first) * d.target_stride, last - first,
                d.stored_stride, d.target_stride});
      return;
    }
    for (std::uint64_t i = first; i < last; ++i) {
      walk(dim + 1, stored + i * d.stored_stride,
           target + static_cast<std::int64_t>(i) * d.target_stride, window, visit);
    }
  }

  std::vector<Dim> dims_;  // by decreasing stored_stride; empty if there are no elements
  std::vector<std::uint64_t> extents_;  // by dimension; the last one is the size of an element
  std::uint64_t begin_ = 0;
  std::uint64_t elements_ = 0;
  std::size_t item_bytes_ = 1;
  std::size_t target_item_bytes_ = 1;
};

/// Returns true if the box lies within the tensor.
bool box_inside(std::span<const std::uint64_t> sizes, std::span<const std::uint64_t> offsets,
                std::span<const std::uint64_t> lengths);

}  // namespace torch_ckpt::planning
