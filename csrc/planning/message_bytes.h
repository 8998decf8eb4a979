#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace torch_ckpt::planning {

/// Appends a number in base 128, lowest digit first. A set top bit means that more digits follow.
inline void put(std::string& bytes, std::uint64_t number) {
  for (; number >= 0x80; number >>= 7) bytes += static_cast<char>(number | 0x80);
  bytes += static_cast<char>(number);
}

/// Appends a text and its size.
inline void put(std::string& bytes, std::string_view text) {
  put(bytes, std::uint64_t{text.size()});
  bytes += text;
}

// Reads what put() has appended. After bytes that put() cannot have written, all results are empty
// and has_failed() is true.
class MessageReader {
 public:
  explicit MessageReader(std::string_view bytes) : rest_(bytes) {}

  std::uint64_t number() {
    std::uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      if (rest_.empty()) break;
      const auto byte = static_cast<unsigned char>(rest_.front());
      rest_.remove_prefix(1);
      value |= std::uint64_t{byte & 0x7fu} << shift;
      if (byte < 0x80) return value;
    }
    has_failed_ = true;
    return 0;
  }
  /// Reads the number of elements that follow. Each needs at least one byte.
  std::size_t count() {
    const std::uint64_t value = number();
    if (value <= rest_.size()) return static_cast<std::size_t>(value);
    has_failed_ = true;
    return 0;
  }
  std::string_view text() {
    const std::size_t size = count();
    const std::string_view found = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return found;
  }
  bool has_failed() const { return has_failed_; }
  bool is_at_end() const { return rest_.empty(); }

 private:
  std::string_view rest_;
  bool has_failed_ = false;
};

}  // namespace torch_ckpt::planning
