#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "error.h"
#include "format/little_endian.h"

namespace torch_ckpt::format {

/// The opcodes that occur in metadata and in tensor headers, named as in pickletools.
namespace op {
inline constexpr unsigned char kMark = '(';
inline constexpr unsigned char kStop = '.';
inline constexpr unsigned char kBinint = 'J';
inline constexpr unsigned char kBinint1 = 'K';
inline constexpr unsigned char kBinint2 = 'M';
inline constexpr unsigned char kNone = 'N';
inline constexpr unsigned char kBinpersid = 'Q';
inline constexpr unsigned char kReduce = 'R';
inline constexpr unsigned char kBinunicode = 'X';
inline constexpr unsigned char kAppend = 'a';
inline constexpr unsigned char kBuild = 'b';
inline constexpr unsigned char kGlobal = 'c';
inline constexpr unsigned char kEmptyDict = '}';
inline constexpr unsigned char kAppends = 'e';
inline constexpr unsigned char kBinget = 'h';
inline constexpr unsigned char kLongBinget = 'j';
inline constexpr unsigned char kEmptyList = ']';
inline constexpr unsigned char kBinput = 'q';
inline constexpr unsigned char kLongBinput = 'r';
inline constexpr unsigned char kSetitem = 's';
inline constexpr unsigned char kTuple = 't';
inline constexpr unsigned char kEmptyTuple = ')';
inline constexpr unsigned char kSetitems = 'u';
inline constexpr unsigned char kBinfloat = 'G';
inline constexpr unsigned char kBinbytes = 'B';
inline constexpr unsigned char kShortBinbytes = 'C';
inline constexpr unsigned char kProto = 0x80;
inline constexpr unsigned char kNewobj = 0x81;
inline constexpr unsigned char kTuple1 = 0x85;
inline constexpr unsigned char kTuple2 = 0x86;
inline constexpr unsigned char kTuple3 = 0x87;
inline constexpr unsigned char kNewtrue = 0x88;
inline constexpr unsigned char kNewfalse = 0x89;
inline constexpr unsigned char kLong1 = 0x8a;
inline constexpr unsigned char kShortBinunicode = 0x8c;
inline constexpr unsigned char kBinunicode8 = 0x8d;
inline constexpr unsigned char kBinbytes8 = 0x8e;
inline constexpr unsigned char kStackGlobal = 0x93;
inline constexpr unsigned char kMemoize = 0x94;
inline constexpr unsigned char kFrame = 0x95;
}  // namespace op

/// An opcode and its argument. The views point into the pickle.
struct PickleToken {
  unsigned char code = 0;
  std::size_t at = 0;        // offset of the opcode in the pickle
  std::uint64_t number = 0;  // the argument as unsigned; for text, bytes and LONG1: the length
  std::string_view bytes;    // contents of text, bytes or LONG1; module of a GLOBAL
  std::string_view name;     // name of a GLOBAL in its module
};

// Splits a pickle into tokens without interpreting them. An opcode that is not listed above is
// returned without an argument. The caller must refuse it: its argument would be read as opcodes.
class PickleReader {
 public:
  static constexpr std::size_t kNameBytes = 256;  // limit for a GLOBAL's module, and for its name
  static constexpr std::size_t kIntegerBytes = 16;

  explicit PickleReader(std::span<const std::byte> bytes) : size_(bytes.size()), unread_(bytes) {}

  /// Reads the next token. Returns false if the pickle ends within the token or if the token
  /// exceeds a limit; error() is then Errc::pickle_truncated or Errc::pickle_too_large.
  bool next(PickleToken& token);
  const std::optional<Error>& error() const { return error_; }

  /// Offset of the byte after the last token.
  std::size_t position() const { return size_ - unread_.left(); }

 private:
  std::string_view line(std::size_t token_at);
  void fail(Errc code, std::size_t at, const char* detail);

  std::size_t size_;
  ByteReader unread_;
  std::optional<Error> error_;
};

}  // namespace torch_ckpt::format
