#pragma once

#include "engine/executor.h"
#include "engine/warnings.h"
#include "staging/chunk_pool.h"

namespace torch_ckpt::engine {

// What saves and loads share: threads, the memory they stage in, and what they have to tell. Who
// starts a session passes it, and it outlives the session.
struct Context {
  Warnings warnings;
  staging::ChunkPool chunks;
  Executor executor{warnings};

  /// That of all sessions of this process; made lazily, and anew in a forked child, which has none
  /// of its parent's threads. It lives until the process ends.
  static Context& process();
};

}  // namespace torch_ckpt::engine
