#include "format/item_locations.h"

#include <algorithm>

namespace torch_ckpt::format {
namespace {

constexpr std::size_t kMaxNumberBytes = 10;
constexpr unsigned char kMore = 0x80;  // set in all bytes of a number but the last

void put_number(std::string& out, std::uint64_t number) {
  while (number >= kMore) {
    out += static_cast<char>(number | kMore);
    number >>= 7;
  }
  out += static_cast<char>(number);
}

/// Removes a number from the front. The encoding must be complete.
std::uint64_t take_number(std::string_view& encoded) {
  std::uint64_t number = 0;
  std::size_t bytes = 0;
  unsigned char byte = kMore;
  for (unsigned shift = 0; (byte & kMore) != 0; shift += 7) {
    byte = static_cast<unsigned char>(encoded[bytes++]);
    number |= static_cast<std::uint64_t>(byte & ~kMore) << shift;
  }
  encoded.remove_prefix(bytes);
  return number;
}

}  // namespace

ItemLocations::ItemLocations(std::span<const ItemLocation> locations) : size_(locations.size()) {
  std::uint64_t last = 0;
  std::uint64_t end = 0;
  for (const ItemLocation& location : locations) {
    const std::uint64_t step = location.item - last;
    put_number(encoded_, (step << 1) ^ (0 - (step >> 63)));
    put_number(encoded_, location.offset - end);
    put_number(encoded_, location.length);
    last = location.item;
    end = location.offset + location.length;
  }
}

std::optional<ItemLocations> ItemLocations::decode(std::string_view encoded) {
  std::size_t numbers = 0;
  std::size_t bytes = 0;  // of the current number
  for (const char byte : encoded) {
    if (++bytes > kMaxNumberBytes) return std::nullopt;
    if ((static_cast<unsigned char>(byte) & kMore) != 0) continue;
    bytes = 0;
    ++numbers;
  }
  if (bytes != 0 || numbers % 3 != 0) return std::nullopt;
  ItemLocations locations;
  locations.encoded_ = encoded;
  locations.size_ = numbers / 3;
  return locations;
}

std::vector<ItemLocation> ItemLocations::decoded() const {
  std::vector<ItemLocation> locations;
  locations.reserve(size_);
  std::string_view left = encoded_;
  ItemLocation location;
  while (!left.empty()) {
    const std::uint64_t zigzag = take_number(left);
    location.item += (zigzag >> 1) ^ (0 - (zigzag & 1));
    location.offset += location.length + take_number(left);
    location.length = take_number(left);
    locations.push_back(location);
  }
  return locations;
}

}  // namespace torch_ckpt::format
