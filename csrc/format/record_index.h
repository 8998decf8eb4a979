#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "error.h"
#include "format/tensor_pickle.h"

namespace torch_ckpt::format {

/// Random access to the bytes of one record, in memory or in a file.
class RecordBytes {
 public:
  virtual ~RecordBytes() = default;
  /// Size of the record in bytes.
  virtual std::uint64_t size() const = 0;
  /// Reads exactly `length` bytes at `offset`. The result is valid until the next call.
  virtual Result<std::span<const std::byte>> at(std::uint64_t offset, std::uint64_t length) = 0;
};

/// Location, checksum and header of a record's payload.
struct RecordIndex {
  TensorHeader header;
  std::uint64_t payload_offset = 0;  // within the record
  std::uint64_t payload_bytes = 0;
  std::uint32_t payload_crc = 0;  // 0 for a non-empty payload means that it was not computed
};

/// Reads the archive around the payload without reading the payload. Accepts only an uncompressed,
/// little-endian torch.save archive of one plain tensor. Checks every offset and length against the
/// record's size before using it.
Result<RecordIndex> index_record(RecordBytes& record);

/// Result of check_entries().
struct EntryCheck {
  bool is_archive = false;        // false: nothing was checked
  std::uint64_t without_crc = 0;  // number of entries that have no checksum, so were not checked
};

/// Verifies the entries of an archive, except `skip`, against their CRC-32s. Reads at most 1 MiB at
/// a time. Fails if the record looks like an archive but is inconsistent.
Result<EntryCheck> check_entries(RecordBytes& record, std::string_view skip = {});

/// Verifies the entries of an archive against their CRC-32s. Fails only with checksum_mismatch.
/// Ignores records that are not archives or are inconsistent: decoding them fails.
Result<> check_archive(RecordBytes& record);

}  // namespace torch_ckpt::format
