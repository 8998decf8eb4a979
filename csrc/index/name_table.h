#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "index/id_table.h"

namespace torch_ckpt::index {

/// Unique names, numbered in the order in which they were added.
class NameTable {
 public:
  std::size_t size() const { return begins_.size() - 1; }
  std::string_view at(std::size_t number) const {
    return std::string_view(texts_).substr(begins_[number], begins_[number + 1] - begins_[number]);
  }
  std::optional<std::uint32_t> find(std::string_view name) const;
  /// Returns the number of the name, and true if it was not in the table before.
  std::pair<std::uint32_t, bool> add(std::string_view name);
  void reserve(std::size_t names) {
    begins_.reserve(names + 1);
    numbers_.reserve(names);
  }

 private:
  std::string texts_;
  std::vector<std::uint64_t> begins_{0};
  IdTable numbers_;
};

}  // namespace torch_ckpt::index
