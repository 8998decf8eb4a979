#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "format/pickle_reader.h"

namespace torch_ckpt::format {

/// Writes a protocol 4 pickle, opcode by opcode, in one or more parts.
class PickleWriter {
 public:
  PickleWriter() { bytes_ = {static_cast<char>(op::kProto), 4}; }
  /// Continues a pickle that has already memoized `memoized` values.
  explicit PickleWriter(std::uint32_t memoized) : memoized_(memoized) {}

  void put(unsigned char code) { bytes_ += static_cast<char>(code); }
  void boolean(bool value) { put(value ? op::kNewtrue : op::kNewfalse); }
  void text(std::string_view text) {
    counted(op::kShortBinunicode, op::kBinunicode, op::kBinunicode8, text);
  }
  void bytes(std::string_view bytes) {
    counted(op::kShortBinbytes, op::kBinbytes, op::kBinbytes8, bytes);
  }
  /// value: from 0 to 2^63 - 1.
  void number(std::uint64_t value) {
    if (value <= 0xff) {
      put(op::kBinint1);
      little(value, 1);
    } else if (value <= 0xffff) {
      put(op::kBinint2);
      little(value, 2);
    } else if (value <= 0x7fffffff) {
      put(op::kBinint);
      little(value, 4);
    } else {
      // Use the fewest bytes that keep the sign bit clear.
      std::size_t size = 5;
      while (size < 8 && value >> (8 * size - 1) != 0) ++size;
      put(op::kLong1);
      little(size, 1);
      little(value, size);
    }
  }
  /// Memoizes the value on top of the stack and returns its index.
  std::uint32_t memoize() {
    put(op::kMemoize);
    return memoized_++;
  }
  /// Pushes a memoized value.
  void fetch(std::uint32_t index) {
    put(index <= 0xff ? op::kBinget : op::kLongBinget);
    little(index, index <= 0xff ? 1 : 4);
  }
  void global(std::string_view module, std::string_view name) {
    text(module);
    text(name);
    put(op::kStackGlobal);
  }

  /// Makes room for `bytes` more bytes.
  void reserve(std::size_t bytes) { bytes_.reserve(bytes_.size() + bytes); }
  std::size_t size() const { return bytes_.size(); }
  std::uint32_t memoized() const { return memoized_; }
  /// Returns the bytes written since the last take_part(). Later writes continue the pickle.
  std::string take_part() { return std::exchange(bytes_, {}); }

 private:
  void little(std::uint64_t value, std::size_t bytes) {
    for (std::size_t i = 0; i < bytes; ++i) bytes_ += static_cast<char>((value >> (8 * i)) & 0xff);
  }
  void counted(unsigned char one, unsigned char four, unsigned char eight, std::string_view text) {
    const bool is_short = text.size() <= 0xff;
    const bool is_long = text.size() > 0xffffffff;
    put(is_short ? one : is_long ? eight : four);
    little(text.size(), is_short ? 1 : is_long ? 8 : 4);
    bytes_ += text;
  }

  std::string bytes_;
  std::uint32_t memoized_ = 0;
};

}  // namespace torch_ckpt::format
