#include "format/partial_crc.h"

#include <zlib.h>

#include "format/crc32.h"

namespace torch_ckpt::format {
namespace {

/// Returns the CRC-32 of `bytes` zeros.
std::uint32_t crc32_of_zeros(std::uint64_t bytes) {
  return ~crc32_join(~std::uint32_t{0}, 0, bytes);
}

}  // namespace

std::uint32_t PartialCrc::shifted(std::uint32_t raw, std::uint64_t bytes) {
  if (raw == 0 || bytes == 0) return raw;
  if (shift_.bytes != bytes) {
    shift_ = {bytes, ::crc32_combine_gen(static_cast<z_off_t>(bytes))};
  }
  return static_cast<std::uint32_t>(::crc32_combine_op(raw, 0, shift_.op));
}

void PartialCrc::add(std::uint64_t position, std::uint64_t bytes, std::uint32_t crc) {
  if (bytes == 0) return;
  if (zeros_.bytes != bytes) zeros_ = {bytes, crc32_of_zeros(bytes)};
  raw_ = shifted(raw_, position + bytes - position_) ^ crc ^ static_cast<std::uint32_t>(zeros_.op);
  position_ = position + bytes;
}

std::uint32_t PartialCrc::share(std::uint64_t block_bytes) {
  return shifted(raw_, block_bytes - position_);
}

std::uint32_t crc32_of_shares(std::uint32_t shares, std::uint64_t block_bytes) {
  return shares ^ crc32_of_zeros(block_bytes);
}

}  // namespace torch_ckpt::format
