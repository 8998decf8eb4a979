#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "staging/source.h"

namespace torch_ckpt::staging {

/// Fills `out` with the payload's bytes [offset, offset + out.size()) of a host source, gathering
/// strided ones. The range must lie within the payload; any byte offset is allowed.
void copy_from_host(const Source& source, std::uint64_t offset, std::span<std::byte> out);

/// The same, leaving the destination out of the processor's caches: for memory that is not looked
/// at again soon, this saves reading lines that are overwritten whole.
void copy_past_caches(const Source& source, std::uint64_t offset, std::span<std::byte> out);
void copy_bytes_past_caches(std::byte* out, const std::byte* in, std::size_t bytes);

}  // namespace torch_ckpt::staging
