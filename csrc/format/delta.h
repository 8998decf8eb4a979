#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "error.h"
#include "format/checksum_table.h"
#include "format/safe_checksums.h"
#include "format/safetensors.h"

namespace torch_ckpt::format {

// A delta: the changes from one directory of safetensors files, the base, to another, the version.
//
//   delta    := "TCD1" payload* contents bytes:u64 crc:u32 "TCD1"
//                                 ; size of the contents; CRC-32 of contents and size
//   contents := base:text checksums:text file*
//                                 ; name of the base; the version's checksums (safe_checksums.h)
//   file     := start:text tensor*
//                                 ; one for each file in `checksums`. If the file has a checksum
//                                 ; table, its header, then its tensors, in the order of the header;
//                                 ; otherwise all of its bytes
//   tensor   := in_base:u8 block*
//                                 ; 1 if the base has a tensor with this name, dtype and shape; the
//                                 ; blocks are the same as in the checksum table
//   block    := change:u8 bytes:u32 crc:u32 base_crc:u32
//                                 ; size and CRC-32 of the payload; CRC-32 of the base's block
//   payload  :=                   ; change 0: the base's block
//             | count:u32 gap* element*
//                                 ; change 1: the changed elements
//             | byte*             ; change 2: the entire block
//   gap      := 0xff* byte        ; number of elements between two changed ones: the sum of the
//                                 ; bytes, of which only the last is less than 255
//   text     := bytes:u32 byte[bytes]
//
// Integers are little-endian. An element of more than eight bytes counts as several of eight.

/// The name of the file in a version's directory.
inline constexpr std::string_view kDeltaName = "torch_ckpt.delta";
/// The bytes before the first payload, and at the end of a delta.
inline constexpr std::string_view kDeltaMagic = "TCD1";

enum class BlockChange : std::uint8_t { none, sparse, full };

/// The change of one block of a tensor.
struct DeltaBlock {
  BlockChange change = BlockChange::none;
  std::uint32_t bytes = 0;
  std::uint32_t crc = 0;
  std::uint32_t base_crc = 0;
  std::uint64_t begin = 0;  // offset of the payload in the delta

  bool operator==(const DeltaBlock&) const = default;
};

struct DeltaTensor {
  bool is_in_base = false;
  RecordSums sums;  // of the version's tensor; without blocks if the tensor is empty
  std::vector<DeltaBlock> blocks;

  bool operator==(const DeltaTensor&) const = default;
};

/// A file of the version.
struct DeltaFile {
  std::string name;
  std::uint64_t bytes = 0;
  bool has_tensors = false;
  std::string start;                 // the header of a safetensors file; otherwise all bytes
  std::string table;                 // encoded checksum table of a safetensors file
  std::vector<SafeTensor> tensors;   // in the order of the header
  std::vector<DeltaTensor> changes;  // of each tensor
};

struct DeltaContents {
  std::string base;
  std::vector<DeltaFile> files;
};

/// Encodes the change of a block, and appends the payload to `out`. The blocks have equal sizes, a
/// multiple of `item_bytes`. Chooses the smallest payload. Sets all members except `base_crc` and
/// `begin`.
DeltaBlock encode_change(std::span<const std::byte> base, std::span<const std::byte> version,
                         std::size_t item_bytes, std::string& out);

/// Encodes a block that the base lacks: change 2.
DeltaBlock encode_full_block(std::span<const std::byte> version, std::string& out);

/// Checks that a payload has the checksum of `block`, and that it changes only elements of a block
/// of `block_bytes` bytes.
bool is_valid_payload(const DeltaBlock& block, std::span<const std::byte> payload,
                      std::uint64_t block_bytes, std::size_t item_bytes);

/// Returns the changed elements in a valid payload of change 1.
std::span<const std::byte> sparse_elements(std::span<const std::byte> payload,
                                           std::size_t item_bytes);

/// Exchanges the elements of a block with `elements`, at the places in a valid payload of change 1.
void exchange_elements(std::span<const std::byte> payload, std::span<std::byte> elements,
                       std::span<std::byte> block, std::size_t item_bytes);

/// Changes a block of the base to the version's. The payload must be valid.
void apply_change(BlockChange change, std::span<const std::byte> payload,
                  std::span<std::byte> block, std::size_t item_bytes);

/// Encodes everything after the payloads.
std::string encode_delta_end(const DeltaContents& contents);

/// Decodes the contents of a delta. Fails with Errc::checksum_mismatch if the contents were damaged
/// after they were written, and with Errc::metadata_inconsistent if they were not written in this
/// version's format. Memory and time are proportional to the size of the contents.
Result<DeltaContents> decode_delta(std::span<const std::byte> delta);

}  // namespace torch_ckpt::format
