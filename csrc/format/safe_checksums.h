#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "error.h"

namespace torch_ckpt::format {

// The checksums of a directory of safetensors files, in a file that other readers ignore.
//
//   checksums := "TCF1" files:u32 file* crc:u32    ; CRC-32 of the preceding bytes
//   file      := name:text bytes:u64 header_crc:u32 table:text
//   text      := bytes:u32 byte[bytes]
//
// Integers are little-endian. `table` is a checksum table (format/checksum_table.h) with one raw
// record for each tensor that is not empty, at the offset of the tensor's data in the file.

/// The name of the file.
inline constexpr std::string_view kSafeChecksumsName = "torch_ckpt.checksums";

/// The checksums of one safetensors file.
struct SafeChecksums {
  std::string name;              // in the directory
  std::uint64_t bytes = 0;       // size of the file
  std::uint32_t header_crc = 0;  // CRC-32 of the bytes before the data
  std::string table;

  bool operator==(const SafeChecksums&) const = default;
};

std::string encode_safe_checksums(std::span<const SafeChecksums> files);

/// Fails with Errc::checksum_mismatch if the bytes were damaged after they were written, and with
/// Errc::table_inconsistent if they were not written in this version's format. Each name
/// occurs once, and names a file directly in the directory.
Result<std::vector<SafeChecksums>> decode_safe_checksums(std::span<const std::byte> bytes);

}  // namespace torch_ckpt::format
