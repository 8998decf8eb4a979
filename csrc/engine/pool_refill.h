#pragma once

#include "engine/context.h"

namespace torch_ckpt::engine {

/// Allocates the chunks of the pool's refill (staging/chunk_pool.h) on a low-priority thread. Does
/// not wait for them. Stops at the first error, because the next save tries again.
void refill_pool(Context& context) noexcept;

}  // namespace torch_ckpt::engine
