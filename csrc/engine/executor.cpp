#include "engine/executor.h"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <latch>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "os/fork_guard.h"

namespace torch_ckpt::engine {
namespace {

// Two writes of each of four files, and some to stage, checksum and fsync.
constexpr std::size_t kQuietThreads = 16;

using Pool = std::unique_ptr<boost::asio::thread_pool>;

struct Holder {
  std::mutex mutex;
  std::vector<std::pair<Threads, Pool>> pools;  // guarded by mutex
  // Pools without threads: the channels of sessions that outlive them still refer to them.
  std::vector<Pool> joined;  // guarded by mutex
};

Pool make_pool(const Threads& threads) {
  // Quiet threads serve one save at a time.
  const bool quiet = threads.priority != os::Priority{};
  std::size_t count = threads.count;
  if (count == 0) count = quiet ? kQuietThreads : executor_threads();
  auto pool = std::make_unique<boost::asio::thread_pool>(count);
  if (quiet) {
    // The first task of each thread, since none gets past the latch before all are there.
    auto all = std::make_shared<std::latch>(static_cast<std::ptrdiff_t>(count));
    for (std::size_t i = 0; i < count; ++i) {
      boost::asio::post(*pool, [all, priority = threads.priority] {
        os::lower_priority(priority);
        all->arrive_and_wait();
      });
    }
  }
  return pool;
}

}  // namespace

std::size_t executor_threads() {
  const std::size_t cores = std::max(1U, std::thread::hardware_concurrency());
  return std::clamp<std::size_t>(4 * cores, 16, 128);
}

boost::asio::thread_pool& executor(const Threads& threads) {
  Holder& holder = os::ForkLocal<Holder>::get();
  std::lock_guard lock(holder.mutex);
  for (auto& [of, pool] : holder.pools) {
    if (of == threads) return *pool;
  }
  holder.pools.emplace_back(threads, make_pool(threads));
  return *holder.pools.back().second;
}

void join_executor() {
  Holder* holder = os::ForkLocal<Holder>::existing();
  if (holder == nullptr) return;
  std::vector<std::pair<Threads, Pool>> pools;
  {
    std::lock_guard lock(holder->mutex);
    pools = std::move(holder->pools);
    holder->pools.clear();
  }
  // Quiet threads wait for work of the default pool, never the other way round at a session's end.
  std::stable_partition(pools.begin(), pools.end(),
                        [](const auto& entry) { return entry.first != Threads{}; });
  for (auto& [of, pool] : pools) pool->join();
  std::lock_guard lock(holder->mutex);
  for (auto& [of, pool] : pools) holder->joined.push_back(std::move(pool));
}

}  // namespace torch_ckpt::engine
