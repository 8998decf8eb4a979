#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "error.h"
#include "format/tensor_pickle.h"

namespace torch_ckpt::format {

// A record is the output of torch.save(tensor, buffer): an uncompressed zip archive. docs/format.md
// gives the grammar. The layout depends only on the sizes of data.pkl and the payload, so it is
// known before the payload is read:
//
//   head     up to and including the local header of archive/data/0   contains data.pkl
//   payload  the tensor's bytes, aligned to 64 bytes in the record
//   tail     data descriptor, two small entries, central directory    contains the payload's CRC-32

/// Sizes of the parts of a record.
struct RecordLayout {
  std::uint64_t head_bytes = 0;  // also the offset of the payload
  std::uint64_t payload_bytes = 0;
  std::uint64_t tail_bytes = 0;

  std::uint64_t total_bytes() const { return head_bytes + payload_bytes + tail_bytes; }
};

// Encodes the records of all tensors with the same pickle and number of bytes, which differ only in
// their payloads and checksums.
class RecordTemplate {
 public:
  RecordTemplate(std::string_view pickle, std::uint64_t payload_bytes);

  const RecordLayout& layout() const { return layout_; }
  /// The head, which ends where the payload begins.
  const std::string& head() const { return head_; }
  std::uint32_t head_crc() const { return head_crc_; }
  /// Returns the tail for a payload with the CRC-32 `payload_crc`.
  std::string encode_tail(std::uint32_t payload_crc) const;

 private:
  RecordLayout layout_;
  std::string head_;
  std::uint32_t head_crc_ = 0;
  std::string tail_;  // of a payload with the CRC-32 0
  // Values and positions that depend on the payload's CRC-32 in the tail: the CRC-32 itself,
  // torch's digest of all CRC-32s, which is at the end of the entry .data/serialization_id, and the
  // CRC-32 of that entry.
  std::uint64_t head_digest_ = 0;
  std::uint32_t version_crc_ = 0;
  std::array<std::size_t, 2> payload_crcs_at_{};
  std::size_t id_at_ = 0;
  std::array<std::size_t, 2> id_crcs_at_{};
};

}  // namespace torch_ckpt::format
