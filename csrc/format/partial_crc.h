#pragma once

#include <cstdint>

namespace torch_ckpt::format {

// The share of one rank in the CRC-32 of a block that several ranks write.
//
// CRC-32 without its initial and final complement is linear (W. W. Peterson, D. T. Brown, "Cyclic
// Codes for Error Detection", 1961): it maps the XOR of two blocks to the XOR of their checksums.
// A block is the XOR of the ranks' shares, each of which has zeros in the place of all other bytes.
// So the ranks compute the checksums of their shares independently, and crc32_of_shares() turns the
// XOR of these into the CRC-32 of the block.
class PartialCrc {
 public:
  /// Adds `bytes` bytes at `position` in the block, whose CRC-32 is `crc`. Positions ascend.
  void add(std::uint64_t position, std::uint64_t bytes, std::uint32_t crc);
  /// Returns the share's checksum, given the size of the block.
  std::uint32_t share(std::uint64_t block_bytes);

 private:
  // An operator for crc32_combine_op(), kept because a strided share uses the same one many times.
  struct Shift {
    std::uint64_t bytes = 0;
    std::uint64_t op = 0;
  };
  std::uint32_t shifted(std::uint32_t raw, std::uint64_t bytes);

  std::uint32_t raw_ = 0;
  std::uint64_t position_ = 0;
  Shift shift_;
  Shift zeros_;  // `op` is the CRC-32 of that many zeros
};

/// Returns the CRC-32 of a block, given the XOR of the checksums of all shares.
std::uint32_t crc32_of_shares(std::uint32_t shares, std::uint64_t block_bytes);

}  // namespace torch_ckpt::format
