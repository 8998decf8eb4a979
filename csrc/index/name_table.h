#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

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
  void reserve(std::size_t names);

 private:
  struct Slot {
    std::uint32_t number = kFree;
    std::uint32_t hash = 0;  // low bits of the name's hash, to skip most string comparisons
  };
  static constexpr std::uint32_t kFree = 0xffffffff;

  /// Returns the slot that holds the name, or the free slot for it.
  std::size_t slot_of(std::string_view name, std::uint64_t hash) const;

  std::string texts_;
  std::vector<std::uint64_t> begins_{0};
  std::vector<Slot> slots_;
};

}  // namespace torch_ckpt::index
