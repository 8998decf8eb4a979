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
  struct Slot {
    std::uint32_t number = kFree;
    std::uint32_t hash = 0;  // of the name, in part: most others differ in it
  };
  static constexpr std::uint32_t kFree = 0xffffffff;

  /// That of the name, or the free one where it belongs.
  std::size_t slot_of(std::string_view name, std::uint64_t hash) const;

  std::string texts_;
  std::vector<std::uint64_t> begins_{0};
  std::vector<Slot> slots_;
};

}  // namespace torch_ckpt::index
