#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace torch_ckpt::format {

/// Copies `in` to `out`, and updates the CRC-32 `crc` with the copy (format/crc32.h), in one pass.
/// Long copies bypass the caches: they do not read the cache lines that they overwrite, and do not
/// evict others. The ranges must not overlap.
std::uint32_t crc32_copy(std::uint32_t crc, std::span<const std::byte> in, std::byte* out);

/// Copies `in` to `out`. Long copies bypass the caches. The ranges must not overlap.
void copy_past_caches(std::span<const std::byte> in, std::byte* out);

/// The implementations of crc32_copy(). For long copies, crc32_copy() chooses the last one that the
/// processor supports.
enum class CopyCode {
  portable,
  avx2,    // AVX2 and VPCLMULQDQ
  avx512,  // AVX-512F and VPCLMULQDQ
};
bool is_supported(CopyCode code);
/// `code` must be supported.
std::uint32_t crc32_copy(CopyCode code, std::uint32_t crc, std::span<const std::byte> in,
                         std::byte* out);

}  // namespace torch_ckpt::format
