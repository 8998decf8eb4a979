#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace torch_ckpt::planning {

// The positions of a box's elements in a row-major tensor: runs of equal length, in ascending
// order. The box itself is packed: its elements are contiguous, in the same order. All numbers are
// in bytes.
class BoxRuns {
 public:
  /// Returns nullopt if the box does not lie within the tensor, or if a size overflows.
  static std::optional<BoxRuns> of(std::span<const std::uint64_t> sizes,
                                   std::span<const std::uint64_t> offsets,
                                   std::span<const std::uint64_t> lengths,
                                   std::uint64_t item_bytes);

  /// Size of the tensor, and of the box.
  std::uint64_t tensor_bytes() const { return tensor_bytes_; }
  std::uint64_t bytes() const { return bytes_; }
  /// Size of each run; 0 if the box is empty.
  std::uint64_t run_bytes() const { return run_bytes_; }
  /// Position of the first byte in the tensor.
  std::uint64_t begin() const { return begin_; }
  /// Position behind the last byte in the tensor.
  std::uint64_t end() const { return end_; }
  /// Returns how many of the box's bytes lie before a position in the tensor.
  std::uint64_t bytes_before(std::uint64_t position) const;

  /// Calls visit(position, packed, bytes) for each run, or part of a run, among the packed bytes
  /// [from, to), in ascending order: its positions in the tensor and in the packed box, and its
  /// size.
  template <class Visit>
  void for_each(std::uint64_t from, std::uint64_t to, Visit&& visit) const {
    if (from >= to) return;
    std::vector<std::uint64_t> index(dims_.size());
    std::uint64_t run = from / run_bytes_;
    std::uint64_t position = begin_;
    for (std::size_t d = dims_.size(); d-- > 0;) {
      index[d] = run % dims_[d].count;
      run /= dims_[d].count;
      position += index[d] * dims_[d].stride;
    }
    std::uint64_t skipped = from % run_bytes_;
    for (std::uint64_t packed = from; packed < to;) {
      const std::uint64_t bytes = std::min(run_bytes_ - skipped, to - packed);
      visit(position + skipped, packed, bytes);
      packed += bytes;
      skipped = 0;
      for (std::size_t d = dims_.size(); d-- > 0;) {
        position += dims_[d].stride;
        if (++index[d] < dims_[d].count) break;
        position -= dims_[d].count * dims_[d].stride;
        index[d] = 0;
      }
    }
  }

 private:
  struct Dim {
    std::uint64_t count = 0;
    std::uint64_t stride = 0;
  };

  std::vector<Dim> dims_;  // of the runs, outermost first
  std::uint64_t tensor_bytes_ = 0;
  std::uint64_t bytes_ = 0;
  std::uint64_t run_bytes_ = 0;
  std::uint64_t begin_ = 0;
  std::uint64_t end_ = 0;
};

}  // namespace torch_ckpt::planning
