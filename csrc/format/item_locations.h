#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace torch_ckpt::format {

/// The location of a saved item in its file.
struct ItemLocation {
  std::uint64_t item = 0;    // item number in the plan
  std::uint64_t offset = 0;  // in the file, in bytes
  std::uint64_t length = 0;  // in bytes

  bool operator==(const ItemLocation&) const = default;
};

// The locations of the items of one file, in a compact encoding, because the coordinator of a save
// receives the locations of all ranks' items. Equal locations have equal encodings.
//
//   locations := (item gap length)*
//   item      := number      ; minus the previous item's number (or 0), in zigzag encoding
//   gap       := number      ; bytes between the end of the previous item (or 0) and this item
//   length    := number
//   number    := LEB128      ; modulo 2^64
class ItemLocations {
 public:
  ItemLocations() = default;
  explicit ItemLocations(std::span<const ItemLocation> locations);
  /// Returns nullopt unless `encoded` consists of complete locations.
  static std::optional<ItemLocations> decode(std::string_view encoded);

  std::size_t size() const { return size_; }
  std::string_view encoded() const { return encoded_; }
  std::vector<ItemLocation> decoded() const;

  bool operator==(const ItemLocations&) const = default;

 private:
  std::string encoded_;
  std::size_t size_ = 0;
};

}  // namespace torch_ckpt::format
