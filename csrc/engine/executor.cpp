#include "engine/executor.h"

#include <algorithm>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/post.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "engine/warnings.h"
#include "os/fork_guard.h"
#include "os/mutex.h"
#include "os/thread.h"

namespace torch_ckpt::engine {
namespace {

namespace asio = boost::asio;

// Two writes of each of four files, and some to stage, checksum and fsync.
constexpr std::size_t kQuietThreads = 16;

constexpr std::string_view kThreadsTopic = "threads";

struct Pool {
  explicit Pool(const Threads& kind) : of(kind), work(context.get_executor()) {}

  // Quiet threads serve one save at a time.
  bool is_quiet() const { return of.priority != os::Priority{}; }
  std::size_t least() const {
    if (of.count != 0) return of.count;
    return is_quiet() ? kQuietThreads : executor_threads();
  }

  const Threads of;
  asio::io_context context;
  std::optional<asio::executor_work_guard<asio::io_context::executor_type>> work;
  std::vector<std::thread> threads;  // of a pool in Holder::pools, guarded by Holder::mutex
};

struct Holder {
  os::Mutex mutex;
  std::vector<std::unique_ptr<Pool>> pools TC_GUARDED_BY(mutex);
  // Pools without threads: the channels of sessions that outlive them still refer to them.
  std::vector<std::unique_ptr<Pool>> joined TC_GUARDED_BY(mutex);
  std::size_t long_tasks TC_GUARDED_BY(mutex) = 0;
};

Pool& find_or_make(Holder& holder, const Threads& threads) TC_REQUIRES(holder.mutex) {
  for (const auto& pool : holder.pools) {
    if (pool->of == threads) return *pool;
  }
  return *holder.pools.emplace_back(std::make_unique<Pool>(threads));
}

/// How many threads a pool should have beside `waiting` ones that wait for a disk.
std::size_t wanted_threads(const Holder& holder, const Pool& pool, std::size_t waiting)
    TC_REQUIRES(holder.mutex) {
  std::size_t wanted = pool.least();
  if (pool.of.count == 0) wanted = std::max(wanted, wanted / 2 + waiting);
  if (pool.of == Threads{}) wanted += holder.long_tasks;
  return wanted;
}

Result<> enlarge(Pool& pool, std::size_t wanted) {
  pool.threads.reserve(std::max(wanted, pool.threads.size()));
  while (pool.threads.size() < wanted) {
    std::thread thread;
    auto started = os::start_thread(thread, [&pool] {
      if (pool.is_quiet()) os::lower_priority(pool.of.priority);
      pool.context.run();
    });
    if (!started) return started;
    pool.threads.push_back(std::move(thread));
  }
  return {};
}

Pool* pool_with_threads(Holder& holder, Pool& preferred) TC_REQUIRES(holder.mutex) {
  if (!preferred.threads.empty()) return &preferred;
  for (const auto& pool : holder.pools) {
    if (!pool->threads.empty()) return pool.get();
  }
  return nullptr;
}

Result<> need_threads(Holder& holder, const Threads& threads, std::size_t waiting)
    TC_REQUIRES(holder.mutex) {
  Pool& pool = find_or_make(holder, threads);
  const std::size_t wanted = wanted_threads(holder, pool, waiting);
  auto enlarged = enlarge(pool, wanted);
  if (enlarged) return {};
  if (pool_with_threads(holder, pool) == nullptr) return enlarged;
  warn_once(kThreadsTopic, "the system allows torch_ckpt " + std::to_string(pool.threads.size()) +
                               " of " + std::to_string(wanted) +
                               " threads, so that saves and loads may be slower; raise " +
                               os::thread_limits());
  return {};
}

}  // namespace

std::size_t executor_threads() {
  const std::size_t cores = std::max(1U, std::thread::hardware_concurrency());
  return std::clamp<std::size_t>(4 * cores, 16, 128);
}

asio::io_context& executor(const Threads& threads) {
  Holder& holder = os::ForkLocal<Holder>::get();
  const os::MutexLock lock(holder.mutex);
  Pool& pool = find_or_make(holder, threads);
  // need_threads() tells that there is none.
  if (pool.threads.empty()) static_cast<void>(need_threads(holder, threads, 0));
  Pool* const usable = pool_with_threads(holder, pool);
  return usable != nullptr ? usable->context : pool.context;
}

Result<> need_threads(const Threads& threads, std::size_t waiting) {
  Holder& holder = os::ForkLocal<Holder>::get();
  const os::MutexLock lock(holder.mutex);
  return need_threads(holder, threads, waiting);
}

Result<> post_long_tasks(std::size_t count, std::string_view operation, const LongTask& task,
                         const std::function<void(Error)>& refused) {
  if (count == 0) return {};
  Holder& holder = os::ForkLocal<Holder>::get();
  const auto add = [&holder](std::size_t more) {
    const os::MutexLock lock(holder.mutex);
    holder.long_tasks += more;
  };
  add(count);
  const std::shared_ptr<const void> threads(&holder, [add, count](const void*) { add(-count); });
  if (auto there = need_threads({}, 0); !there) return there;
  // Asio copies a handler before it calls it: a copy must not need memory, which may be at its end.
  const auto shared = std::make_shared<const LongTask>(task);
  for (std::size_t i = 0; i < count; ++i) {
    try {
      asio::post(executor(), [shared, held = threads]() mutable { (*shared)(std::move(held)); });
    } catch (...) {
      refused(exception_error(std::current_exception(), operation));
    }
  }
  return {};
}

void join_executor() {
  Holder* holder = os::ForkLocal<Holder>::existing();
  if (holder == nullptr) return;
  std::vector<std::unique_ptr<Pool>> pools;
  {
    const os::MutexLock lock(holder->mutex);
    pools = std::move(holder->pools);
    holder->pools.clear();
  }
  // Quiet threads wait for work of the default pool, never the other way round at a session's end.
  std::stable_partition(pools.begin(), pools.end(),
                        [](const auto& pool) { return pool->of != Threads{}; });
  for (auto& pool : pools) {
    pool->work.reset();
    for (std::thread& thread : pool->threads) thread.join();
    pool->threads.clear();
  }
  forget_warning(kThreadsTopic);
  const os::MutexLock lock(holder->mutex);
  for (auto& pool : pools) holder->joined.push_back(std::move(pool));
}

}  // namespace torch_ckpt::engine
