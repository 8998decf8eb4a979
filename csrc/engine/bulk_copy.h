#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "engine/context.h"
#include "error.h"
#include "staging/chunk_pool.h"
#include "staging/source.h"

namespace torch_ckpt::engine {

/// A copy and the memory that holds it. The memory returns to the chunk pool when its last owner
/// is destroyed, so the pool must outlive all copies.
struct PooledCopy {
  std::byte* address = nullptr;
  std::shared_ptr<staging::Chunk> memory;
};

/// Copies sources in host memory into chunks from the context's pool, using several threads, and
/// blocks until all are copied. Copies are aligned to 64 bytes; small ones share a chunk.
Result<std::vector<PooledCopy>> copy_to_pool(Context& context,
                                             std::span<const staging::Source> sources);

}  // namespace torch_ckpt::engine
