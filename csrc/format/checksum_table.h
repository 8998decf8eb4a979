#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "error.h"

namespace torch_ckpt::format {

// A checksum table says of each record in a data file what its archive cannot: checksums of blocks
// of the payload, so that a part of it can be verified, and of all that is not payload. It lies in
// the metadata, not in the file; docs/format.md has the grammar.

/// What of one record can be checked beyond the archive's own CRC-32.
struct RecordSums {
  std::uint64_t offset = 0;        // of the record in its file
  std::uint32_t envelope_crc = 0;  // CRC-32 of the bytes before the payload and behind it, joined
  std::uint64_t block_bytes = 0;   // power of two; 0: no blocks
  std::vector<std::uint32_t> block_crcs;  // of the payload's blocks in order; the last may be
                                          // shorter
  bool raw = false;                       // a bytes item: all of it is payload

  bool operator==(const RecordSums&) const = default;
};

/// Block size for a payload: at most 1024 blocks, never below 16 KiB nor above 1 MiB; larger only
/// where the table could not count the blocks otherwise (16 TiB).
std::uint64_t block_bytes_for(std::uint64_t payload_bytes);

/// Records must be in ascending order of offset, no two at the same one.
std::string encode_checksum_table(std::span<const RecordSums> records);

// A parsed view over bytes that outlive it. Decoding is strict: every length is checked before it
// is used, and nothing is allocated in proportion to a count that was not.
// Const methods may be called by several threads at once.
class ChecksumTable {
 public:
  /// Fails with checksum_mismatch where the bytes are not those that were written, with
  /// table_inconsistent where they were never a table of this version.
  static Result<ChecksumTable> decode(std::span<const std::byte> bytes);

  /// nullopt where the table says nothing of a record at this offset. O(log n).
  std::optional<RecordSums> find(std::uint64_t offset) const;

  /// Number of records.
  std::size_t size() const { return first_blocks_.size(); }

 private:
  ChecksumTable() = default;

  std::span<const std::byte> entries_;
  std::span<const std::byte> crcs_;          // of blocks
  std::vector<std::uint64_t> first_blocks_;  // of each record, in crcs_
};

}  // namespace torch_ckpt::format
