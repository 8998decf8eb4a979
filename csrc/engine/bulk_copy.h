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

/// Where a copy lies, and what keeps it there: the memory goes back to the chunk pool with the last
/// owner, whose pool outlives it.
struct PooledCopy {
  std::byte* address = nullptr;
  std::shared_ptr<staging::Chunk> memory;
};

/// Copies sources from host memory into memory of the context's chunk pool, by several threads, and
/// waits for them. Copies are aligned to 64 bytes; small ones share memory.
Result<std::vector<PooledCopy>> copy_to_pool(Context& context,
                                             std::span<const staging::Source> sources);

}  // namespace torch_ckpt::engine
