#pragma once

#include <array>
#include <cstdint>
#include <span>
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

RecordLayout lay_out_record(std::string_view pickle, std::uint64_t payload_bytes);

/// Returns the head, which ends where the payload begins.
std::string encode_head(std::string_view pickle, std::uint64_t payload_bytes);

/// Returns the tail, for a payload with the CRC-32 `payload_crc`.
std::string encode_tail(std::string_view pickle, std::uint64_t payload_bytes,
                        std::uint32_t payload_crc);

}  // namespace torch_ckpt::format
