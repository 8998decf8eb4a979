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

/// Which threads do some work. The default is the pool of all work that somebody waits for.
struct Threads {
  os::Priority priority;
  std::size_t count = 0;  // 0: chosen for the machine

  bool operator==(const Threads&) const = default;
};

/// Gets what keeps the threads that the pool has for it.
using LongTask = std::function<void(std::shared_ptr<const void> threads)>;

// Thread pools, one for each kind: made lazily. No thread of them ever takes the GIL. Where the
// system refuses threads, a pool works with those it has, and one that has none leaves its work to
// another pool: no work may wait for other work that has not begun.
// Safe for concurrent use by multiple threads.
class Executor {
 public:
  /// `warnings` outlives it.
  explicit Executor(Warnings& warnings);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  boost::asio::io_context& pool(const Threads& threads = {});

  /// Before work is given to pool(threads): fails where there is no thread to do it. A pool whose
  /// count is chosen for the machine is enlarged so that it has threads left beside `waiting` ones
  /// that wait for a disk.
  Result<> need_threads(const Threads& threads, std::size_t waiting);

  /// Posts `count` tasks of `operation` to the default pool that keep a thread until they end, as
  /// those of a load. The pool gets as many threads more, so that nothing else waits for them; it
  /// has these for as long as a task keeps what it was given. Fails where there is no thread at
  /// all. A task that cannot be posted is `refused`: those before it work on what the caller has
  /// given.
  Result<> post_long_tasks(std::size_t count, std::string_view operation, const LongTask& task,
                           const std::function<void(Error)>& refused);

  /// Ends the pools after the work they have; for interpreter exit. The next pool() makes a new
  /// one.
  void join();

 private:
  struct Pool;

  Pool& find_or_make(const Threads& threads) TC_REQUIRES(mutex_);
  Pool* pool_with_threads(Pool& preferred) TC_REQUIRES(mutex_);
  std::size_t wanted_threads(const Pool& pool, std::size_t waiting) TC_REQUIRES(mutex_);
  Result<> enlarge(const Threads& threads, std::size_t waiting) TC_REQUIRES(mutex_);

  Warnings& warnings_;
  os::Mutex mutex_;
  std::vector<std::unique_ptr<Pool>> pools_ TC_GUARDED_BY(mutex_);
  // Pools without threads: the channels of sessions that outlive them still refer to them.
  std::vector<std::unique_ptr<Pool>> joined_ TC_GUARDED_BY(mutex_);
  std::size_t long_tasks_ TC_GUARDED_BY(mutex_) = 0;
};

/// Threads in a pool: most of them wait for the disk, so there are more than cores.
std::size_t executor_threads();

}  // namespace torch_ckpt::engine
