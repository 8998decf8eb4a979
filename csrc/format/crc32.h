#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace torch_ckpt::format {

/// The zip CRC-32 (ISO 3309, reflected 0xEDB88320) of `data`, continued from `crc` (0 to begin).
std::uint32_t crc32(std::uint32_t crc, std::span<const std::byte> data);

/// Where a sample of a tensor's bytes lies: all of them, or `stripes` of equal length that are
/// evenly spread from its first item to its last one and come to `most_bytes`.
struct Sample {
  std::uint64_t item_bytes;
  std::uint64_t most_bytes;
  std::uint64_t stripes;  // at least 2
};

/// The CRC-32 of a sample of `data`, stripe behind stripe.
std::uint32_t crc32_of_sample(std::span<const std::byte> data, const Sample& sample);

/// The CRC-32 of two byte strings joined, from theirs and the second one's length.
std::uint32_t crc32_join(std::uint32_t first, std::uint32_t second, std::uint64_t second_bytes);

}  // namespace torch_ckpt::format
