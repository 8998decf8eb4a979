#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace torch_ckpt::index {

/// Formats numbers for a message: "[2, 3]".
std::string listed(std::span<const std::int64_t> numbers);

/// True if a box of `sizes` at `offsets` is inside a tensor of `tensor_sizes`. False if they do not
/// have the same number of dimensions.
bool lies_inside(std::span<const std::int64_t> offsets, std::span<const std::int64_t> sizes,
                 std::span<const std::int64_t> tensor_sizes);

/// Lists of sizes or offsets, in elements. Each list is stored once, so equal ids mean equal lists.
class ExtentsTable {
 public:
  /// Adds the list unless it is in the table. Returns its id.
  std::uint32_t intern(std::span<const std::int64_t> numbers);

  std::span<const std::int64_t> at(std::uint32_t id) const {
    return std::span(numbers_).subspan(begins_[id], begins_[id + 1] - begins_[id]);
  }
  std::size_t size() const { return begins_.size() - 1; }

 private:
  void grow();

  std::vector<std::int64_t> numbers_;
  std::vector<std::uint64_t> begins_{0};
  std::vector<std::uint32_t> slots_;  // id + 1; 0 is free
};

}  // namespace torch_ckpt::index
