#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "error.h"

namespace torch_ckpt::index {

// The seal after the pickle in a `.metadata` file that this engine wrote. Stock torch stops at the
// end of the pickle and does not read the seal. Integers are little-endian.
//
//   seal := "TCM1" crc:u32 bytes:u64   ; CRC-32 and number of the bytes before the seal

inline constexpr std::size_t kSealBytes = 4 + 4 + 8;

std::string seal_of(std::span<const std::string_view> pieces);

/// Verifies the bytes before the seal against it, and returns how many there are. Returns nullopt
/// if there is no seal; a damaged seal is indistinguishable from other bytes after the pickle.
///
/// Fails with Errc::checksum_mismatch if the bytes have changed since they were sealed.
Result<std::optional<std::uint64_t>> bytes_sealed(std::span<const std::byte> file);

}  // namespace torch_ckpt::index
