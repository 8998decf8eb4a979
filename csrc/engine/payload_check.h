#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "error.h"
#include "format/checksum_table.h"
#include "format/record_index.h"

namespace torch_ckpt::engine {

// Checksums payload bytes as they are read, in ascending order of position, in one of two ways:
//
//   by_blocks()  compares each block with the checksum that the save recorded. Each range of bytes
//                must begin at a block boundary or where the previous range ended.
//   one_sum()    computes the CRC-32 of all bytes of a piece. The caller joins the sums of the
//                pieces and compares the result with the archive's CRC-32.
class PayloadCheck {
 public:
  /// Checks nothing.
  PayloadCheck() = default;
  /// `sums` must outlive the check.
  static PayloadCheck by_blocks(const format::RecordSums& sums, std::uint64_t payload_bytes);
  static PayloadCheck one_sum();

  /// Adds bytes, and copies them to `out` unless it is nullptr. Fails with Errc::checksum_mismatch
  /// if they complete a damaged block; the error's offset is the position of the block in the
  /// payload.
  Result<> update(std::uint64_t position, std::span<const std::byte> bytes,
                  std::byte* out = nullptr);

  /// Returns the CRC-32 and the number of the bytes added. Only valid with one_sum().
  std::pair<std::uint32_t, std::uint64_t> sum() const { return {crc_, bytes_added_}; }

 private:
  const format::RecordSums* sums_ = nullptr;
  bool active_ = false;
  std::uint64_t payload_bytes_ = 0;
  std::uint32_t crc_ = 0;
  std::uint64_t bytes_added_ = 0;
};

/// True if the archive has a checksum of the payload. A zero for a non-empty payload means that the
/// writer did not compute one (torch.serialization.set_crc32_options(False)).
inline bool has_checksum(std::uint32_t crc, std::uint64_t bytes) { return crc != 0 || bytes == 0; }

/// Returns a pointer to `sums` if they contain block checksums for this kind of record, otherwise
/// nullptr. `raw` is true if the record has no archive.
const format::RecordSums* block_sums(const std::optional<format::RecordSums>& sums, bool raw);

/// Verifies the bytes before and after a record's payload against their checksum. The payload must
/// lie within the record.
Result<> check_envelope(const format::RecordSums& sums, format::RecordBytes& record,
                        std::uint64_t payload_offset, std::uint64_t payload_bytes);

/// Returns the error for a record whose tensor differs from the metadata. `found` and `expected`
/// describe what differs, e.g. "dtype float32".
Error tensor_mismatch(const std::string& found, const std::string& expected);
/// Formats a shape, e.g. "shape [3, 40]".
std::string shape_text(const std::vector<std::uint64_t>& sizes);

/// `source` names the origin of the expected checksum in the message.
Error checksum_error(std::uint32_t expected, std::uint32_t found, const char* source,
                     std::uint64_t offset = Error::kNoOffset);

}  // namespace torch_ckpt::engine
