#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "error.h"
#include "format/tensor_pickle.h"

namespace torch_ckpt::format {

/// Reads parts of one record, in memory or in a file.
class RecordBytes {
 public:
  virtual ~RecordBytes() = default;
  /// Size of the record in bytes.
  virtual std::uint64_t size() const = 0;
  /// Reads exactly `length` bytes at `offset`. They are valid until the next call.
  virtual Result<std::span<const std::byte>> at(std::uint64_t offset, std::uint64_t length) = 0;
};

/// Location, checksum and header of a record's payload.
struct RecordIndex {
  TensorHeader header;
  std::uint64_t payload_offset = 0;  // in the record
  std::uint64_t payload_bytes = 0;
  std::uint32_t payload_crc = 0;  // 0 with a non-empty payload: the writer did not compute it
};

/// Reads the archive around the payload, but no byte of the payload. Accepts only an uncompressed,
/// little-endian torch.save archive of one plain tensor. Every offset and length is checked against
/// the record before it is used.
Result<RecordIndex> index_record(RecordBytes& record);

/// Result of check_entries().
struct EntryCheck {
  bool is_archive = false;        // false: the bytes were not checked
  std::uint64_t without_crc = 0;  // number of entries without a checksum, which were not checked
};

/// Compares the entries of an archive, except `skip`, with their CRC-32s. Reads at most 1 MiB at a
/// time. Fails if the record looks like an archive but is not a consistent one.
Result<EntryCheck> check_entries(RecordBytes& record, std::string_view skip = {});

/// Compares the entries of an archive with their CRC-32s. The only failure is checksum_mismatch: a
/// file that is no archive, or an inconsistent one, is left to the code that decodes it.
Result<> check_archive(RecordBytes& record);

}  // namespace torch_ckpt::format
