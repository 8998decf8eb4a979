#pragma once

#include <cstddef>

#include "engine/context.h"
#include "error.h"
#include "staging/source.h"

namespace torch_ckpt::engine {

/// Makes chunks of the context's pool until its reserve (staging/chunk_pool.h), or
/// `most_bytes` of it, are there, by several of these threads, and waits for them. They are
/// page-locked for `device`, if one is given. The bytes of the reserve that are there.
Result<std::size_t> grow_reserve(Context& context, std::size_t most_bytes, const Threads& threads,
                                 int device = staging::Source::kHost);

}  // namespace torch_ckpt::engine
