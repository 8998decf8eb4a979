#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "error.h"

namespace torch_ckpt::format {

// A checksum table supplements the checksums in the zip archives of a data file's records. It holds
// checksums of payload blocks, to verify partial reads, and of the bytes outside the payload. It is
// stored in the metadata, not in the data file. docs/format.md gives the grammar.

/// The checksums of one record.
struct RecordSums {
  std::uint64_t offset = 0;        // offset of the record in the file
  std::uint32_t envelope_crc = 0;  // CRC-32 of the bytes before and after the payload, joined
  std::uint64_t block_bytes = 0;   // power of two; 0: no block checksums
  std::vector<std::uint32_t> block_crcs;  // CRC-32s of the payload's blocks; the last may be short
  bool raw = false;                       // a bytes item: the whole record is payload

  bool operator==(const RecordSums&) const = default;
};

/// Returns the block size for a payload: the smallest power of two from 16 KiB to 1 MiB that yields
/// at most 1024 blocks, otherwise 1 MiB. For payloads of about 16 TiB or more, returns a larger
/// size, because the table's block counts have 24 bits.
std::uint64_t block_bytes_for(std::uint64_t payload_bytes);

/// The offsets of `records` must be strictly ascending.
std::string encode_checksum_table(std::span<const RecordSums> records);

// A parsed view of bytes that must outlive it. Every count and length is checked before it is used.
// Const methods may be called from several threads at once.
class ChecksumTable {
 public:
  /// Fails with checksum_mismatch if the bytes were damaged after they were written, and with
  /// table_inconsistent if they were not written as a table of this version.
  static Result<ChecksumTable> decode(std::span<const std::byte> bytes);

  /// Returns nullopt if the table has no record at this offset. O(log n).
  std::optional<RecordSums> find(std::uint64_t offset) const;

  /// Number of records.
  std::size_t size() const { return first_blocks_.size(); }

 private:
  ChecksumTable() = default;

  std::span<const std::byte> entries_;
  std::span<const std::byte> crcs_;          // CRC-32s of all blocks
  std::vector<std::uint64_t> first_blocks_;  // by record: the index of its first block
};

}  // namespace torch_ckpt::format
