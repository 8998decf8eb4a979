#pragma once

#include "engine/executor.h"
#include "engine/warnings.h"
#include "staging/chunk_pool.h"

namespace torch_ckpt::engine {

// Resources shared by saves and loads: thread pools, staging memory and pending warnings. The
// caller passes a context to each session that it starts; the context must outlive the session.
struct Context {
  Warnings warnings;
  staging::ChunkPool chunks;
  Executor executor{warnings};

  Context() = default;
  /// Cancels the refill of the chunk pool, so that the executor need not complete it.
  ~Context() { chunks.cancel_refill(); }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  /// Runs all queued work but a refill of the chunk pool, then ends the threads; for process exit.
  void join() {
    chunks.cancel_refill();
    executor.join();
  }

  /// Returns the context of this process, which is created on first use and lives until the process
  /// ends. A forked child gets a new context, because it has none of its parent's threads.
  static Context& process();
};

}  // namespace torch_ckpt::engine
