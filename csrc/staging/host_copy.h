#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "staging/source.h"

namespace torch_ckpt::staging {

/// Copies the bytes [offset, offset + out.size()) of a host source's payload to `out`, gathering
/// strided elements. The range must lie within the payload; it may begin and end within an element.
void copy_from_host(const Source& source, std::uint64_t offset, std::span<std::byte> out);

/// Like copy_from_host(), but with stores that bypass the caches, for memory that will not be read
/// soon. Such stores avoid reading the cache lines that they overwrite. Strided sources are copied
/// normally.
void copy_past_caches(const Source& source, std::uint64_t offset, std::span<std::byte> out);
/// Copies bytes with stores that bypass the caches.
void copy_bytes_past_caches(std::byte* out, const std::byte* in, std::size_t bytes);

}  // namespace torch_ckpt::staging
