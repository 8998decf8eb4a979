#include "engine/reserve.h"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <functional>
#include <latch>
#include <thread>

#include "engine/first_failure.h"

namespace torch_ckpt::engine {
namespace {

// The kernel clears pages as fast as memory takes it with fewer threads than this.
constexpr unsigned kMostThreads = 16;

}  // namespace

Result<std::size_t> grow_reserve(Context& context, std::size_t most_bytes, const Threads& threads,
                                 int device) {
  staging::ChunkPool& pool = context.chunks;
  if (auto there = context.executor.need_threads(threads, 0); !there) return there.error();
  boost::asio::io_context& executor = context.executor.pool(threads);
  const unsigned at_once = std::clamp(std::thread::hardware_concurrency(), 1U, kMostThreads);
  FirstFailure<> failure;
  std::latch done(static_cast<std::ptrdiff_t>(at_once));
  // A task of its own for each chunk, so that a save's work on the same threads comes in between.
  const auto end = [&](Error error) {
    failure.set(std::move(error));
    done.count_down();
  };
  std::function<void()> grow;
  const auto begin = [&] {
    try {
      boost::asio::post(executor, [&grow] { grow(); });
    } catch (...) {
      end(exception_error(std::current_exception(), "grow_reserve"));
    }
  };
  grow = [&] {
    Result<bool> grown = false;
    try {
      grown = pool.grow_reserve(most_bytes, device);
    } catch (...) {
      grown = exception_error(std::current_exception(), "grow_reserve");
    }
    if (grown && *grown) return begin();
    if (!grown) return end(grown.error());
    done.count_down();
  };
  for (unsigned i = 0; i < at_once; ++i) begin();
  done.wait();
  if (auto error = failure.get()) return *error;
  // Those of another caller who makes the same reserve.
  pool.wait_until_grown();
  return pool.reserved_bytes();
}

}  // namespace torch_ckpt::engine
