#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace torch_ckpt::index {

/// Names in the order in which they were added, each once, and found by what they say.
class NameTable {
 public:
  std::size_t size() const { return begins_.size() - 1; }
  std::string_view at(std::size_t number) const {
    return std::string_view(texts_).substr(begins_[number], begins_[number + 1] - begins_[number]);
  }
  std::optional<std::uint32_t> find(std::string_view name) const;
  /// Its number, and whether it is new.
  std::pair<std::uint32_t, bool> add(std::string_view name);
  /// Makes room for so many names.
  void reserve(std::size_t names);

 private:
  std::size_t slot_of(std::string_view name) const;

  std::string texts_;
  std::vector<std::uint64_t> begins_{0};
  std::vector<std::uint32_t> slots_;  // number + 1; 0 is free
};

}  // namespace torch_ckpt::index
