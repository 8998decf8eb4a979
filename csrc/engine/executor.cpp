#include "engine/executor.h"

#include <algorithm>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/post.hpp>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "os/thread.h"

namespace torch_ckpt::engine {
namespace {

namespace asio = boost::asio;

// Two writes of each of four files, and some to stage, checksum and fsync.
constexpr std::size_t kQuietThreads = 16;

constexpr std::string_view kThreadsTopic = "threads";

}  // namespace

struct Executor::Pool {
  explicit Pool(const Threads& kind) : of(kind), work(context.get_executor()) {}

  // Quiet threads serve one save at a time.
  bool is_quiet() const { return of.priority != os::Priority{}; }
  std::size_t least() const {
    if (of.count != 0) return of.count;
    return is_quiet() ? kQuietThreads : executor_threads();
  }
  Result<> enlarge(std::size_t wanted);

  const Threads of;
  asio::io_context context;
  std::optional<asio::executor_work_guard<asio::io_context::executor_type>> work;
  std::vector<std::thread> threads;  // of a pool in Executor::pools_, guarded by its mutex
};

Result<> Executor::Pool::enlarge(std::size_t wanted) {
  threads.reserve(std::max(wanted, threads.size()));
  while (threads.size() < wanted) {
    std::thread thread;
    auto started = os::start_thread(thread, [this] {
      if (is_quiet()) os::lower_priority(of.priority);
      context.run();
    });
    if (!started) return started;
    threads.push_back(std::move(thread));
  }
  return {};
}

std::size_t executor_threads() {
  const std::size_t cores = std::max(1U, std::thread::hardware_concurrency());
  return std::clamp<std::size_t>(4 * cores, 16, 128);
}

Executor::Executor(Warnings& warnings) : warnings_(warnings) {}

Executor::~Executor() { join(); }

Executor::Pool& Executor::find_or_make(const Threads& threads) {
  for (const auto& pool : pools_) {
    if (pool->of == threads) return *pool;
  }
  return *pools_.emplace_back(std::make_unique<Pool>(threads));
}

Executor::Pool* Executor::pool_with_threads(Pool& preferred) {
  if (!preferred.threads.empty()) return &preferred;
  for (const auto& pool : pools_) {
    if (!pool->threads.empty()) return pool.get();
  }
  return nullptr;
}

/// How many threads a pool should have beside `waiting` ones that wait for a disk.
std::size_t Executor::wanted_threads(const Pool& pool, std::size_t waiting) {
  std::size_t wanted = pool.least();
  if (pool.of.count == 0) wanted = std::max(wanted, wanted / 2 + waiting);
  if (pool.of == Threads{}) wanted += long_tasks_;
  return wanted;
}

Result<> Executor::enlarge(const Threads& threads, std::size_t waiting) {
  Pool& pool = find_or_make(threads);
  const std::size_t wanted = wanted_threads(pool, waiting);
  auto enlarged = pool.enlarge(wanted);
  if (enlarged) return {};
  if (pool_with_threads(pool) == nullptr) return enlarged;
  warnings_.add_once(kThreadsTopic, "the system allows torch_ckpt " +
                                        std::to_string(pool.threads.size()) + " of " +
                                        std::to_string(wanted) +
                                        " threads, so that saves and loads may be slower; raise " +
                                        os::thread_limits());
  return {};
}

asio::io_context& Executor::pool(const Threads& threads) {
  const os::MutexLock lock(mutex_);
  Pool& pool = find_or_make(threads);
  // need_threads() tells that there is none.
  if (pool.threads.empty()) static_cast<void>(enlarge(threads, 0));
  Pool* const usable = pool_with_threads(pool);
  return usable != nullptr ? usable->context : pool.context;
}

Result<> Executor::need_threads(const Threads& threads, std::size_t waiting) {
  const os::MutexLock lock(mutex_);
  return enlarge(threads, waiting);
}

Result<> Executor::post_long_tasks(std::size_t count, std::string_view operation,
                                   const LongTask& task,
                                   const std::function<void(Error)>& refused) {
  if (count == 0) return {};
  const auto add = [this](std::size_t more) {
    const os::MutexLock lock(mutex_);
    long_tasks_ += more;
  };
  add(count);
  const std::shared_ptr<const void> threads(this, [add, count](const void*) { add(-count); });
  if (auto there = need_threads({}, 0); !there) return there;
  // Asio copies a handler before it calls it: a copy must not need memory, which may be at its end.
  const auto shared = std::make_shared<const LongTask>(task);
  for (std::size_t i = 0; i < count; ++i) {
    try {
      asio::post(pool(), [shared, held = threads]() mutable { (*shared)(std::move(held)); });
    } catch (...) {
      refused(exception_error(std::current_exception(), operation));
    }
  }
  return {};
}

void Executor::join() {
  std::vector<std::unique_ptr<Pool>> pools;
  {
    const os::MutexLock lock(mutex_);
    pools = std::move(pools_);
    pools_.clear();
  }
  // Quiet threads wait for work of the default pool, never the other way round at a session's end.
  std::stable_partition(pools.begin(), pools.end(),
                        [](const auto& pool) { return pool->of != Threads{}; });
  for (auto& pool : pools) {
    pool->work.reset();
    for (std::thread& thread : pool->threads) thread.join();
    pool->threads.clear();
  }
  warnings_.forget(kThreadsTopic);
  const os::MutexLock lock(mutex_);
  for (auto& pool : pools) joined_.push_back(std::move(pool));
}

}  // namespace torch_ckpt::engine
