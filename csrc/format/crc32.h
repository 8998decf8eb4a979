#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace torch_ckpt::format {

/// Continues the zip CRC-32 (ISO 3309, reflected 0xEDB88320) `crc` with `data`. Begin with 0.
std::uint32_t crc32(std::uint32_t crc, std::span<const std::byte> data);

/// A sample of a tensor's bytes: all bytes if there are at most `max_bytes`; otherwise `stripes`
/// stripes of equal length, at most `max_bytes` in total, spread evenly over the tensor.
struct Sample {
  std::uint64_t item_bytes;
  std::uint64_t max_bytes;
  std::uint64_t stripes;  // at least 2
};

/// Computes the CRC-32 of the stripes of a sample of `data`, joined.
std::uint32_t crc32_of_sample(std::span<const std::byte> data, const Sample& sample);

/// Computes the CRC-32 of two joined byte strings from their CRC-32s and the second's length.
std::uint32_t crc32_join(std::uint32_t first, std::uint32_t second, std::uint64_t second_bytes);

}  // namespace torch_ckpt::format
