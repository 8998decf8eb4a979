#include "engine/reserve.h"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <functional>
#include <latch>
#include <mutex>
#include <optional>
#include <thread>

#include "staging/chunk_pool.h"

namespace torch_ckpt::engine {
namespace {

// The kernel clears pages as fast as memory takes it with fewer threads than this.
constexpr unsigned kMostThreads = 16;

}  // namespace

Result<std::size_t> grow_reserve(std::size_t most_bytes, const Threads& threads, int device) {
  staging::ChunkPool& pool = staging::ChunkPool::instance();
  boost::asio::thread_pool& executor = engine::executor(threads);
  const unsigned at_once = std::clamp(std::thread::hardware_concurrency(), 1U, kMostThreads);
  std::mutex mutex;
  std::optional<Error> failure;  // guarded by mutex
  std::latch done(static_cast<std::ptrdiff_t>(at_once));
  // A task of its own for each chunk, so that a save's work on the same threads comes in between.
  std::function<void()> grow = [&] {
    auto grown = pool.grow_reserve(most_bytes, device);
    if (grown && *grown) {
      boost::asio::post(executor, [&grow] { grow(); });
      return;
    }
    if (!grown) {
      const std::lock_guard lock(mutex);
      failure = grown.error();
    }
    done.count_down();
  };
  for (unsigned i = 0; i < at_once; ++i) boost::asio::post(executor, [&grow] { grow(); });
  done.wait();
  if (failure) return *failure;
  // Those of another caller who makes the same reserve.
  pool.wait_until_grown();
  return pool.reserved_bytes();
}

}  // namespace torch_ckpt::engine
