#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "error.h"
#include "format/checksum_table.h"

namespace torch_ckpt::format {

/// The checksums of one rank's part of a tensor in a file that several ranks write. The tensor's
/// data is divided into blocks, as in a checksum table. `shares` are the rank's shares
/// (format/partial_crc.h) in the blocks from number `first_block` on.
struct PartSums {
  std::uint64_t tensor = 0;        // offset of the tensor's data in the file
  std::uint64_t tensor_bytes = 0;  // size of the entire tensor
  std::uint64_t bytes = 0;         // size of the part
  std::uint64_t first_block = 0;
  std::vector<std::uint32_t> shares;

  bool operator==(const PartSums&) const = default;
};

// Encoding of the parts of one rank in one file:
//
//   parts := parts:u32 part* crc:u32     ; CRC-32 of the preceding bytes
//   part  := tensor:u64 tensor_bytes:u64 bytes:u64 first_block:u64 shares:u32 share:u32*
std::string encode_part_sums(std::span<const PartSums> parts);
/// Fails with Errc::frame_damaged.
Result<std::vector<PartSums>> decode_part_sums(std::span<const std::byte> bytes);

/// Joins the parts of all ranks in one file into the records of its checksum table. The parts must
/// cover each tensor exactly once. Fails with Errc::frame_damaged if a part does not fit its
/// tensor.
Result<std::vector<RecordSums>> join_part_sums(std::span<const PartSums> parts);

}  // namespace torch_ckpt::format
