#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "error.h"
#include "format/tensor_pickle.h"

namespace torch_ckpt::format {

/// Gives parts of one record; implemented over memory and over a file.
class RecordBytes {
 public:
  virtual ~RecordBytes() = default;
  /// Bytes in the record.
  virtual std::uint64_t size() const = 0;
  /// Exactly `length` bytes at `offset`, valid until the next call.
  virtual Result<std::span<const std::byte>> at(std::uint64_t offset, std::uint64_t length) = 0;
};

/// Where the payload of a record lies and what its archive says of it.
struct RecordIndex {
  TensorHeader header;
  std::uint64_t payload_offset = 0;  // from the record's begin
  std::uint64_t payload_bytes = 0;
  std::uint32_t payload_crc = 0;  // 0 with a non-empty payload: the writer did not compute it
};

/// Reads the archive around the payload, and of the payload nothing. Refuses whatever is not a
/// stored, little-endian torch.save archive of one plain tensor: every offset and length is checked
/// against the record before it is used.
Result<RecordIndex> index_record(RecordBytes& record);

/// What can be said of the entries of an archive of anything.
struct EntriesFound {
  bool archive = false;       // otherwise bytes of another kind, and nothing is known of them
  std::uint64_t unknown = 0;  // entries without a checksum, of which nothing is known either
};

/// Compares the entries with their CRC-32s, but for `skip`, in steps of at most 1 MiB. What looks
/// like an archive must be a sound one.
Result<EntriesFound> check_entries(RecordBytes& record, std::string_view skip = {});

/// Compares the entries of an archive of anything with their CRC-32s. Fails with checksum_mismatch
/// alone: its reader judges a file that is not an archive, or that cannot be walked.
Result<> check_archive(RecordBytes& record);

}  // namespace torch_ckpt::format
