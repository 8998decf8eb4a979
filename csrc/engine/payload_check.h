#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>

#include "error.h"
#include "format/checksum_table.h"
#include "format/record_index.h"

namespace torch_ckpt::engine {

// Checksums the bytes of a payload as they come by, in ascending order. Either block by block,
// against the checksums that the save recorded; what comes then begins at a block's begin, or where
// the last ended. Or all of them, for somebody who joins the sums of a payload's pieces.
class PayloadCheck {
 public:
  /// Checks nothing.
  PayloadCheck() = default;
  /// `sums` outlive it.
  static PayloadCheck by_blocks(const format::RecordSums& sums, std::uint64_t payload_bytes);
  static PayloadCheck whole_payload();

  /// Fails with checksum_mismatch at the end of a block that is damaged; the error's offset is that
  /// of the block in the payload.
  Result<> take(std::uint64_t position, std::span<const std::byte> bytes);

  /// CRC-32 and number of the bytes taken; whole_payload() only.
  std::pair<std::uint32_t, std::uint64_t> sum() const { return {crc_, taken_}; }

 private:
  const format::RecordSums* sums_ = nullptr;
  bool active_ = false;
  std::uint64_t payload_bytes_ = 0;
  std::uint32_t crc_ = 0;
  std::uint64_t taken_ = 0;
};

/// Whether a payload's checksum in its archive is one: zero, of a payload that is not empty, means
/// that the writer did not compute it (torch.serialization.set_crc32_options(False)).
inline bool is_known(std::uint32_t crc, std::uint64_t bytes) { return crc != 0 || bytes == 0; }

/// What is known of a payload block by block, where it is.
const format::RecordSums* blocks_of(const std::optional<format::RecordSums>& sums, bool raw);

/// Compares all of a record that is not payload. The payload lies within the record.
Result<> check_envelope(const format::RecordSums& sums, format::RecordBytes& record,
                        std::uint64_t payload_offset, std::uint64_t payload_bytes);

/// `source` says where the expected one stands.
Error checksum_error(std::uint32_t expected, std::uint32_t found, const char* source,
                     std::uint64_t offset = Error::kNoOffset);

}  // namespace torch_ckpt::engine
