#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "index/id_table.h"

namespace torch_ckpt::index {

/// Formats numbers for a message: "[2, 3]".
std::string listed(std::span<const std::int64_t> numbers);

/// Returns true if a box of `sizes` at `offsets` lies inside a tensor of `tensor_sizes`. Returns
/// false if the numbers of dimensions differ.
bool lies_inside(std::span<const std::int64_t> offsets, std::span<const std::int64_t> sizes,
                 std::span<const std::int64_t> tensor_sizes);

/// Lists of sizes or offsets, in elements. Each list is stored once, so equal lists have equal ids.
class ExtentsTable {
 public:
  /// Returns the list's id. Adds the list if the table does not contain it.
  std::uint32_t intern(std::span<const std::int64_t> numbers);

  std::span<const std::int64_t> at(std::uint32_t id) const {
    return std::span(numbers_).subspan(begins_[id], begins_[id + 1] - begins_[id]);
  }
  std::size_t size() const { return begins_.size() - 1; }

 private:
  std::vector<std::int64_t> numbers_;
  std::vector<std::uint64_t> begins_{0};
  IdTable ids_;
};

}  // namespace torch_ckpt::index
