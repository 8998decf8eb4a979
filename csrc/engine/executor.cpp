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

constexpr std::string_view kThreadsTopic = "threads";

}  // namespace

struct Executor::Pool {
  explicit Pool(const PoolSpec& pool_spec)
      : spec(pool_spec),
        work(context.get_executor()),
        needed(spec.count != 0 ? spec.count : kMinThreads) {}

  bool is_low_priority() const { return spec.priority != os::Priority{}; }
  Result<> enlarge(std::size_t wanted);

  const PoolSpec spec;
  asio::io_context context;
  std::optional<asio::executor_work_guard<asio::io_context::executor_type>> work;
  std::size_t needed;                // without long tasks; guarded by Executor::mutex_
  std::vector<std::thread> threads;  // guarded by Executor::mutex_ until join()
};

Result<> Executor::Pool::enlarge(std::size_t wanted) {
  threads.reserve(std::max(wanted, threads.size()));
  while (threads.size() < wanted) {
    std::thread thread;
    auto started = os::start_thread(thread, [this] {
      if (is_low_priority()) os::lower_priority(spec.priority);
      context.run();
    });
    if (!started) return started;
    threads.push_back(std::move(thread));
  }
  return {};
}

Executor::Executor(Warnings& warnings) : warnings_(warnings) {}

Executor::~Executor() { join(); }

Executor::Pool* Executor::find(const PoolSpec& spec) const {
  for (const auto& pool : pools_) {
    if (pool->spec == spec) return pool.get();
  }
  return nullptr;
}

Executor::Pool& Executor::find_or_create(const PoolSpec& spec) {
  if (Pool* const pool = find(spec)) return *pool;
  return *pools_.emplace_back(std::make_unique<Pool>(spec));
}

Executor::Pool* Executor::pool_with_threads(Pool& preferred) {
  if (!preferred.threads.empty()) return &preferred;
  for (const auto& pool : pools_) {
    if (!pool->threads.empty()) return pool.get();
  }
  return nullptr;
}

Result<> Executor::enlarge(const PoolSpec& spec, std::size_t needed) {
  Pool& pool = find_or_create(spec);
  if (spec.count == 0) pool.needed = std::max(pool.needed, needed);
  const std::size_t wanted = pool.needed + (spec == PoolSpec{} ? long_tasks_ : 0);
  auto enlarged = pool.enlarge(wanted);
  if (enlarged) return {};
  if (pool_with_threads(pool) == nullptr) return enlarged;
  warnings_.add_once(kThreadsTopic, "the system allows torch_ckpt only " +
                                        std::to_string(pool.threads.size()) + " of " +
                                        std::to_string(wanted) +
                                        " threads, so saves and loads may be slower. Raise " +
                                        os::thread_limits() + ".");
  return {};
}

asio::io_context& Executor::pool(const PoolSpec& spec) {
  const os::MutexLock lock(mutex_);
  Pool& pool = find_or_create(spec);
  // Errors can be ignored: ensure_threads() reports them.
  if (pool.threads.empty()) static_cast<void>(enlarge(spec, 0));
  Pool* const usable = pool_with_threads(pool);
  return usable != nullptr ? usable->context : pool.context;
}

Result<> Executor::ensure_threads(const PoolSpec& spec, std::size_t needed) {
  const os::MutexLock lock(mutex_);
  return enlarge(spec, needed);
}

std::size_t Executor::threads(const PoolSpec& spec) const {
  const os::MutexLock lock(mutex_);
  const Pool* const pool = find(spec);
  return pool != nullptr ? pool->threads.size() : 0;
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
  TC_TRY(ensure_threads({}, 0));
  // Asio copies a handler before calling it. Sharing the task ensures that this copy allocates no
  // memory.
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
  // Join low-priority pools first: their work may wait for work in the default pool, but when a
  // session ends, work in the default pool does not wait for theirs.
  std::stable_partition(pools.begin(), pools.end(),
                        [](const auto& pool) { return pool->spec != PoolSpec{}; });
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
