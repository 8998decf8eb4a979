#pragma once

#include "engine/executor.h"
#include "engine/warnings.h"
#include "staging/chunk_pool.h"

namespace torch_ckpt::engine {

// Resources that saves and loads share: thread pools, staging memory and pending warnings. The
// caller passes a context to each session that it starts; the context outlives the session.
struct Context {
  Warnings warnings;
  staging::ChunkPool chunks;
  Executor executor{warnings};

  /// The context of this process, created on first use. It lives until the process ends. A forked
  /// child gets a new one, since it has none of its parent's threads.
  static Context& process();
};

}  // namespace torch_ckpt::engine
