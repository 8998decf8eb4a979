#pragma once

#include <cstddef>

#include "engine/context.h"
#include "error.h"
#include "staging/source.h"

namespace torch_ckpt::engine {

/// Allocates chunks on several threads of the pool `spec` until the reserve of the context's chunk
/// pool (staging/chunk_pool.h) is complete or has `max_bytes`, and waits for them. If `device` is
/// given, page-locks the chunks for it. Returns the number of bytes allocated in the reserve.
Result<std::size_t> grow_reserve(Context& context, std::size_t max_bytes, const PoolSpec& spec,
                                 int device = staging::Source::kHost);

}  // namespace torch_ckpt::engine
