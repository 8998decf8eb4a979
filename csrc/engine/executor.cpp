#include "engine/executor.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "os/fork_guard.h"

namespace torch_ckpt::engine {
namespace {

struct Holder {
  std::mutex mutex;
  std::unique_ptr<boost::asio::thread_pool> pool;  // guarded by mutex
  // Pools without threads: the channels of sessions that outlive them still refer to them.
  std::vector<std::unique_ptr<boost::asio::thread_pool>> joined;  // guarded by mutex
};

}  // namespace

std::size_t executor_threads() {
  const std::size_t cores = std::max(1U, std::thread::hardware_concurrency());
  return std::clamp<std::size_t>(4 * cores, 16, 128);
}

boost::asio::thread_pool& executor() {
  Holder& holder = os::ForkLocal<Holder>::get();
  std::lock_guard lock(holder.mutex);
  if (holder.pool == nullptr) {
    holder.pool = std::make_unique<boost::asio::thread_pool>(executor_threads());
  }
  return *holder.pool;
}

void join_executor() {
  Holder* holder = os::ForkLocal<Holder>::existing();
  if (holder == nullptr) return;
  std::unique_ptr<boost::asio::thread_pool> pool;
  {
    std::lock_guard lock(holder->mutex);
    pool = std::move(holder->pool);
  }
  if (pool == nullptr) return;
  pool->join();
  std::lock_guard lock(holder->mutex);
  holder->joined.push_back(std::move(pool));
}

}  // namespace torch_ckpt::engine
