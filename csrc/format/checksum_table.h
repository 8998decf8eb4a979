#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "error.h"

namespace torch_ckpt::format {

// A checksum table has the checksums of the records in one data file that their archives lack:
// checksums of payload blocks, to verify a part of a payload, and a checksum of the bytes outside
// the payload. It is stored in the metadata, not in the file. docs/format.md has the grammar.

/// The checksums of one record.
struct RecordSums {
  std::uint64_t offset = 0;        // of the record in its file
  std::uint32_t envelope_crc = 0;  // CRC-32 of the bytes before and after the payload, joined
  std::uint64_t block_bytes = 0;   // power of two; 0: no blocks
  std::vector<std::uint32_t> block_crcs;  // of the payload's blocks; the last may be shorter
  bool raw = false;                       // a bytes item: all of it is payload

  bool operator==(const RecordSums&) const = default;
};

/// Block size for a payload: the smallest from 16 KiB on that makes at most 1024 blocks, but at
/// most 1 MiB. Larger only if the table could not count the blocks otherwise (16 TiB).
std::uint64_t block_bytes_for(std::uint64_t payload_bytes);

/// The offsets of `records` must be strictly ascending.
std::string encode_checksum_table(std::span<const RecordSums> records);

// A parsed view over bytes that outlive it. Every count and length is checked before it is used or
// allocated for. Const methods may be called by several threads at once.
class ChecksumTable {
 public:
  /// Fails with checksum_mismatch if the bytes have changed since they were written, and with
  /// table_inconsistent if they were never a table of this version.
  static Result<ChecksumTable> decode(std::span<const std::byte> bytes);

  /// nullopt if the table has no record at this offset. O(log n).
  std::optional<RecordSums> find(std::uint64_t offset) const;

  /// Number of records.
  std::size_t size() const { return first_blocks_.size(); }

 private:
  ChecksumTable() = default;

  std::span<const std::byte> entries_;
  std::span<const std::byte> crcs_;          // of all blocks
  std::vector<std::uint64_t> first_blocks_;  // for each record, the index of its first block
};

}  // namespace torch_ckpt::format
