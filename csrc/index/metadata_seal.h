#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "error.h"

namespace torch_ckpt::index {

// The seal behind the pickle in a `.metadata` file of ours. Stock torch stops at the pickle's end
// and never reads it. Integers are little-endian.
//
//   seal := "TCM1" crc:u32 bytes:u64   ; CRC-32 and number of all bytes before it

inline constexpr std::size_t kSealBytes = 4 + 4 + 8;

std::string seal_of(std::span<const std::string_view> pieces);

/// How many bytes the seal at the end covers, all of them compared with it. Nothing where there is
/// no seal: one that is damaged itself is stray bytes behind the pickle.
///
/// Errc::checksum_mismatch where they are not those that were sealed.
Result<std::optional<std::uint64_t>> bytes_sealed(std::span<const std::byte> file);

}  // namespace torch_ckpt::index
