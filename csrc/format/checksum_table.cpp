#include "format/checksum_table.h"

#include <algorithm>
#include <bit>
#include <string_view>

#include "checked_math.h"
#include "format/crc32.h"
#include "format/little_endian.h"

namespace torch_ckpt::format {
namespace {

constexpr std::uint64_t kMinBlockBytes = std::uint64_t{16} << 10;
constexpr std::uint64_t kPreferredMaxBlockBytes = std::uint64_t{1} << 20;
constexpr std::uint64_t kPreferredMaxBlocks = 1024;
constexpr std::uint64_t kMaxBlocks = (1 << 24) - 1;

constexpr std::string_view kMagic = "TCS1";
constexpr std::size_t kHeadBytes = 4 + 4;
constexpr std::size_t kEntryBytes = 8 + 4 + 1 + 3;
constexpr std::size_t kCrcBytes = 4;
constexpr std::uint64_t kMaxLog2 = 63;
constexpr std::uint64_t kRawFlag = 0x80;  // in the same byte as the logarithm

struct Entry {
  std::uint64_t offset = 0;
  std::uint32_t envelope_crc = 0;
  bool raw = false;
  std::uint64_t block_log2 = 0;
  std::uint64_t blocks = 0;
};

Entry entry_at(std::span<const std::byte> entries, std::size_t index) {
  const auto bytes = entries.subspan(index * kEntryBytes, kEntryBytes);
  return {little_endian(bytes.subspan(0, 8)),
          static_cast<std::uint32_t>(little_endian(bytes.subspan(8, 4))),
          (little_endian(bytes.subspan(12, 1)) & kRawFlag) != 0,
          little_endian(bytes.subspan(12, 1)) & ~kRawFlag, little_endian(bytes.subspan(13, 3))};
}

Error damaged() { return format_error(Errc::checksum_mismatch, "the checksum table is damaged"); }
Error inconsistent(std::string detail) {
  return format_error(Errc::table_inconsistent, std::move(detail));
}

}  // namespace

std::uint64_t block_bytes_for(std::uint64_t payload_bytes) {
  std::uint64_t block = kMinBlockBytes;
  const auto blocks = [&] { return divide_up(payload_bytes, block); };
  while ((block < kPreferredMaxBlockBytes && blocks() > kPreferredMaxBlocks) ||
         blocks() > kMaxBlocks) {
    block *= 2;
  }
  return block;
}

std::string encode_checksum_table(std::span<const RecordSums> records) {
  std::size_t blocks = 0;
  for (const RecordSums& record : records) blocks += record.block_crcs.size();
  std::string out;
  out.reserve(kHeadBytes + records.size() * kEntryBytes + blocks * kCrcBytes + kCrcBytes);
  out += kMagic;
  put(out, records.size(), 4);
  for (const RecordSums& record : records) {
    put(out, record.offset, 8);
    put(out, record.envelope_crc, 4);
    const int log2 = record.block_crcs.empty() ? 0 : std::countr_zero(record.block_bytes);
    put(out, static_cast<std::uint64_t>(log2) | (record.raw ? kRawFlag : 0), 1);
    put(out, record.block_crcs.size(), 3);
  }
  for (const RecordSums& record : records) {
    for (const std::uint32_t crc : record.block_crcs) put(out, crc, kCrcBytes);
  }
  put(out, crc32(0, std::as_bytes(std::span(out))), kCrcBytes);
  return out;
}

Result<ChecksumTable> ChecksumTable::decode(std::span<const std::byte> bytes) {
  if (bytes.size() < kHeadBytes + kCrcBytes) return damaged();
  // Check this first: any later failure is then a writer's bug or another version, not damage.
  const auto body = bytes.first(bytes.size() - kCrcBytes);
  if (crc32(0, body) != little_endian(bytes.subspan(body.size(), kCrcBytes))) return damaged();
  if (!std::ranges::equal(body.first(kMagic.size()), std::as_bytes(std::span(kMagic)))) {
    return inconsistent("the checksum table has an unsupported version");
  }
  const std::uint64_t count = little_endian(body.subspan(kMagic.size(), 4));
  if (count > (body.size() - kHeadBytes) / kEntryBytes) {
    return inconsistent("the checksum table is too short for its number of records");
  }
  ChecksumTable table;
  table.entries_ = body.subspan(kHeadBytes, count * kEntryBytes);
  table.crcs_ = body.subspan(kHeadBytes + count * kEntryBytes);
  table.first_blocks_.reserve(count);
  const std::uint64_t total = table.crcs_.size() / kCrcBytes;
  std::uint64_t blocks = 0;
  std::uint64_t last_offset = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const Entry entry = entry_at(table.entries_, i);
    if (i > 0 && entry.offset <= last_offset) {
      return inconsistent("the records of the checksum table are not in ascending order");
    }
    if (entry.block_log2 > kMaxLog2 || (entry.block_log2 == 0) != (entry.blocks == 0)) {
      return inconsistent("a record of the checksum table has an invalid block size");
    }
    if (entry.blocks > total - blocks) {
      return inconsistent("the checksum table is too short for its number of blocks");
    }
    last_offset = entry.offset;
    table.first_blocks_.push_back(blocks);
    blocks += entry.blocks;
  }
  if (blocks * kCrcBytes != table.crcs_.size()) {
    return inconsistent("the checksum table has bytes after its last block");
  }
  return table;
}

std::optional<RecordSums> ChecksumTable::find(std::uint64_t offset) const {
  // Invariant: if the table has the record, the record's index is in [low, high).
  std::size_t low = 0;
  std::size_t high = size();
  while (high - low > 1) {
    const std::size_t middle = low + (high - low) / 2;
    (entry_at(entries_, middle).offset <= offset ? low : high) = middle;
  }
  if (low == high) return std::nullopt;
  const Entry entry = entry_at(entries_, low);
  if (entry.offset != offset) return std::nullopt;
  RecordSums sums;
  sums.offset = offset;
  sums.envelope_crc = entry.envelope_crc;
  sums.raw = entry.raw;
  if (entry.blocks == 0) return sums;
  sums.block_bytes = std::uint64_t{1} << entry.block_log2;
  sums.block_crcs.reserve(entry.blocks);
  for (std::uint64_t i = 0; i < entry.blocks; ++i) {
    const std::size_t at = (first_blocks_[low] + i) * kCrcBytes;
    sums.block_crcs.push_back(
        static_cast<std::uint32_t>(little_endian(crcs_.subspan(at, kCrcBytes))));
  }
  return sums;
}

}  // namespace torch_ckpt::format
