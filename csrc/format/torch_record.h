#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "error.h"
#include "format/tensor_pickle.h"

namespace torch_ckpt::format {

// A record is what torch.save(tensor, buffer) writes: a stored zip archive. docs/format.md has the
// grammar. Everything but the checksums follows from data.pkl's length and the payload's size, so
// a record is laid out before a byte of the payload has been seen:
//
//   head     up to and including the local header of archive/data/0   depends on data.pkl
//   payload  the tensor's bytes, 64-aligned within the record
//   tail     data descriptor, two small entries, central directory    depends on the payload's CRC

/// Offsets in bytes from the record's begin.
struct RecordLayout {
  std::uint64_t head_bytes = 0;  // = the payload's offset
  std::uint64_t payload_bytes = 0;
  std::uint64_t tail_bytes = 0;

  std::uint64_t total_bytes() const { return head_bytes + payload_bytes + tail_bytes; }
};

RecordLayout lay_out_record(std::string_view pickle, std::uint64_t payload_bytes);

/// The bytes before the payload; size() == head_bytes.
std::string encode_head(std::string_view pickle, std::uint64_t payload_bytes);

/// The bytes behind the payload, whose checksum is `payload_crc`; size() == tail_bytes.
std::string encode_tail(std::string_view pickle, std::uint64_t payload_bytes,
                        std::uint32_t payload_crc);

}  // namespace torch_ckpt::format
