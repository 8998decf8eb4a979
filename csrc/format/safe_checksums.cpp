#include "format/safe_checksums.h"

#include <algorithm>
#include <set>

#include "file_name.h"
#include "format/crc32.h"
#include "format/little_endian.h"

namespace torch_ckpt::format {
namespace {

constexpr std::string_view kMagic = "TCF1";
constexpr std::size_t kCrcBytes = 4;
// The smallest encoding of a file: two empty texts, its size and a CRC-32.
constexpr std::size_t kLeastFileBytes = 4 + 8 + 4 + 4;

}  // namespace

std::string encode_safe_checksums(std::span<const SafeChecksums> files) {
  std::string out(kMagic);
  put(out, files.size(), 4);
  for (const SafeChecksums& file : files) {
    put_text32(out, file.name);
    put(out, file.bytes, 8);
    put(out, file.header_crc, 4);
    put_text32(out, file.table);
  }
  put(out, crc32(0, std::as_bytes(std::span(out))), kCrcBytes);
  return out;
}

Result<std::vector<SafeChecksums>> decode_safe_checksums(std::span<const std::byte> bytes) {
  const std::size_t body = bytes.size() - std::min(bytes.size(), kCrcBytes);
  if (bytes.size() < kCrcBytes ||
      crc32(0, bytes.first(body)) != little_endian(bytes.subspan(body))) {
    return format_error(Errc::checksum_mismatch, "the file of checksums is damaged");
  }
  ByteReader reader(bytes.first(body));
  if (reader.text(kMagic.size()) != kMagic) {
    return format_error(Errc::table_inconsistent,
                        "the file of checksums has an unsupported version");
  }
  const std::uint64_t count = reader.number(4);
  std::vector<SafeChecksums> files;
  files.reserve(std::min<std::uint64_t>(count, reader.left() / kLeastFileBytes));
  for (std::uint64_t i = 0; i < count && !reader.has_failed(); ++i) {
    SafeChecksums& file = files.emplace_back();
    file.name = reader.text32();
    file.bytes = reader.number(8);
    file.header_crc = static_cast<std::uint32_t>(reader.number(4));
    file.table = reader.text32();
  }
  if (reader.has_failed() || reader.left() != 0) {
    return format_error(Errc::table_inconsistent,
                        "the file of checksums does not have the length of its contents");
  }
  std::set<std::string_view> names;
  for (const SafeChecksums& file : files) {
    const bool is_plain = names_file_beneath(file.name) && file.name.find('/') == std::string::npos;
    if (!is_plain || !names.insert(file.name).second) {
      return format_error(Errc::table_inconsistent,
                          "the file of checksums has an invalid name: " + file.name);
    }
  }
  return files;
}

}  // namespace torch_ckpt::format
