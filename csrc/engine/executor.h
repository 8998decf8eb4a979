#pragma once

#include <boost/asio/io_context.hpp>
#include <cstddef>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "engine/warnings.h"
#include "error.h"
#include "os/mutex.h"
#include "os/priority.h"

namespace torch_ckpt::engine {

/// Selects a thread pool. The default selects the pool for work that a caller is waiting for.
struct PoolSpec {
  os::Priority priority;
  std::size_t count = 0;  // number of threads; 0: as many as its work needs

  bool operator==(const PoolSpec&) const = default;
};

/// Number of threads that a pool without a fixed size has at least.
inline constexpr std::size_t kMinThreads = 4;

/// A task that occupies a thread until it ends. The pool has an additional thread for as long as
/// the task holds `threads`.
using LongTask = std::function<void(std::shared_ptr<const void> threads)>;

// Thread pools, one for each PoolSpec, created on first use. Their threads never take the GIL.
// If the system refuses to start threads, a pool works with those it has, and a pool without any
// threads runs its work on another pool. A task must therefore never wait for a task that may still
// be queued. Safe for concurrent use by multiple threads.
class Executor {
 public:
  /// `warnings` must outlive the executor.
  explicit Executor(Warnings& warnings);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  boost::asio::io_context& pool(const PoolSpec& spec = {});

  /// Ensures that work posted to pool(spec) will run; fails if no pool has a thread. A pool without
  /// a fixed size grows to the largest `needed` of all calls, and to at least kMinThreads. Most
  /// threads wait for a disk, so `needed` may exceed the number of cores. Call this before posting
  /// work.
  Result<> ensure_threads(const PoolSpec& spec, std::size_t needed);

  /// Posts `count` tasks to the default pool, each of which occupies a thread until it ends. The
  /// pool grows by `count` threads, so that other work does not wait for these tasks. Fails if no
  /// pool has a thread. If a task cannot be posted, calls `refused` with the error instead; tasks
  /// posted earlier still run, so their data must stay alive. `operation` names the operation in
  /// errors.
  Result<> post_long_tasks(std::size_t count, std::string_view operation, const LongTask& task,
                           const std::function<void(Error)>& refused);

  /// Returns the number of threads of a pool, and 0 if no pool has this spec.
  std::size_t threads(const PoolSpec& spec = {}) const;

  /// Runs all queued work, then ends the threads. Called at interpreter exit. A later call to
  /// pool() creates new threads.
  void join();

 private:
  struct Pool;

  Pool* find(const PoolSpec& spec) const TC_REQUIRES(mutex_);
  Pool& find_or_create(const PoolSpec& spec) TC_REQUIRES(mutex_);
  Pool* pool_with_threads(Pool& preferred) TC_REQUIRES(mutex_);
  Result<> enlarge(const PoolSpec& spec, std::size_t needed) TC_REQUIRES(mutex_);

  Warnings& warnings_;
  mutable os::Mutex mutex_;
  std::vector<std::unique_ptr<Pool>> pools_ TC_GUARDED_BY(mutex_);
  // Pools whose threads have ended. Sessions may still refer to their io_context.
  std::vector<std::unique_ptr<Pool>> joined_ TC_GUARDED_BY(mutex_);
  std::size_t long_tasks_ TC_GUARDED_BY(mutex_) = 0;
};

}  // namespace torch_ckpt::engine
