#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "staging/source.h"

namespace torch_ckpt::staging {

/// Copies the bytes [offset, offset + out.size()) of a host source's payload to `out`, gathering
/// strided elements. The range must lie within the payload; it may begin and end within an element.
void copy_from_host(const Source& source, std::uint64_t offset, std::span<std::byte> out);

/// Like copy_from_host(), but long copies of contiguous sources bypass the caches.
void copy_past_caches(const Source& source, std::uint64_t offset, std::span<std::byte> out);

/// Copies like copy_past_caches(), continues the CRC-32 `crc` with the copied bytes, and returns
/// it.
std::uint32_t copy_and_checksum(std::uint32_t crc, const Source& source, std::uint64_t offset,
                                std::span<std::byte> out);

}  // namespace torch_ckpt::staging
