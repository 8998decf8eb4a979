#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace torch_ckpt::format {

/// Updates the zip CRC-32 (ISO 3309, reflected 0xEDB88320) `crc` with `data`. Start with 0.
std::uint32_t crc32(std::uint32_t crc, std::span<const std::byte> data);

/// Selects a sample of a tensor's bytes. A tensor of at most `max_bytes` is sampled completely; any
/// other, in `stripes` evenly spread stripes of equal length, at most `max_bytes` in total.
struct Sample {
  std::uint64_t item_bytes;
  std::uint64_t max_bytes;
  std::uint64_t stripes;  // at least 2
};

/// Computes the CRC-32 of a sample of `data`, with its stripes joined.
std::uint32_t crc32_of_sample(std::span<const std::byte> data, const Sample& sample);

/// Computes the CRC-32 of the concatenation of two byte strings from their CRC-32s and the length
/// of the second.
std::uint32_t crc32_join(std::uint32_t first, std::uint32_t second, std::uint64_t second_bytes);

}  // namespace torch_ckpt::format
