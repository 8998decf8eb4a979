#pragma once

#include <cstddef>

#include "engine/context.h"
#include "error.h"
#include "staging/source.h"

namespace torch_ckpt::engine {

/// Allocates chunks until the reserve of the context's chunk pool (staging/chunk_pool.h) is
/// complete or has `max_bytes`, and waits for that. Several threads of the pool `spec` allocate
/// chunks. If `device` is given, the chunks are page-locked for it. Returns the bytes of the
/// reserve that are allocated.
Result<std::size_t> grow_reserve(Context& context, std::size_t max_bytes, const PoolSpec& spec,
                                 int device = staging::Source::kHost);

}  // namespace torch_ckpt::engine
