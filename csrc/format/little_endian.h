#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "checked_math.h"

// Little-endian numbers, which all formats in this folder use.
namespace torch_ckpt::format {

/// Decodes an unsigned number of at most eight bytes.
inline std::uint64_t little_endian(std::span<const std::byte> bytes) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    value |= static_cast<std::uint64_t>(bytes[i]) << (8 * i);
  }
  return value;
}

/// Appends the low `bytes` bytes of a number. `bytes` is at most eight.
inline void put(std::string& out, std::uint64_t value, std::size_t bytes) {
  char digits[8];
  for (std::size_t i = 0; i < bytes; ++i) digits[i] = static_cast<char>(value >> (8 * i));
  out.append(digits, bytes);
}

/// Appends a text after its length, which has four bytes.
inline void put_text32(std::string& out, std::string_view text) {
  put(out, text.size(), 4);
  out += text;
}

// Reads bytes from the front. A read past the end returns an empty view or 0, and makes
// has_failed() true. Returned views point into the bytes given to the constructor.
class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) : left_(bytes) {}

  std::span<const std::byte> take(std::uint64_t count) {
    if (!inside(0, count, left_.size())) {
      failed_ = true;
      return {};
    }
    const auto taken = left_.first(count);
    left_ = left_.subspan(count);
    return taken;
  }
  std::uint64_t number(std::size_t count) { return little_endian(take(count)); }
  std::string_view text(std::uint64_t count) {
    const auto taken = take(count);
    return {reinterpret_cast<const char*>(taken.data()), taken.size()};
  }

  /// Reads a text that put_text32() has written.
  std::string_view text32() { return text(number(4)); }

  std::size_t left() const { return left_.size(); }
  bool has_failed() const { return failed_; }

 private:
  std::span<const std::byte> left_;
  bool failed_ = false;
};

}  // namespace torch_ckpt::format
