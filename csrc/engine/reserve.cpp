#include "engine/reserve.h"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <functional>
#include <latch>
#include <thread>

#include "engine/first_failure.h"

namespace torch_ckpt::engine {
namespace {

// Even fewer threads than this can clear pages at full memory bandwidth.
constexpr unsigned kMaxThreads = 16;

}  // namespace

Result<std::size_t> grow_reserve(Context& context, std::size_t max_bytes, const PoolSpec& spec,
                                 int device) {
  staging::ChunkPool& pool = context.chunks;
  if (auto ensured = context.executor.ensure_threads(spec, 0); !ensured) return ensured.error();
  boost::asio::io_context& executor = context.executor.pool(spec);
  const unsigned tasks = std::clamp(std::thread::hardware_concurrency(), 1U, kMaxThreads);
  FirstFailure<> failure;
  std::latch done(static_cast<std::ptrdiff_t>(tasks));
  // Each task allocates one chunk and posts itself again, so that a save on the same threads does
  // not have to wait for the entire reserve.
  const auto end = [&](Error error) {
    failure.set(std::move(error));
    done.count_down();
  };
  std::function<void()> grow;
  const auto post = [&] {
    try {
      boost::asio::post(executor, [&grow] { grow(); });
    } catch (...) {
      end(exception_error(std::current_exception(), "grow_reserve"));
    }
  };
  grow = [&] {
    Result<bool> grown = false;
    try {
      grown = pool.grow_reserve(max_bytes, device);
    } catch (...) {
      grown = exception_error(std::current_exception(), "grow_reserve");
    }
    if (grown && *grown) return post();
    if (!grown) return end(grown.error());
    done.count_down();
  };
  for (unsigned i = 0; i < tasks; ++i) post();
  done.wait();
  if (auto error = failure.get()) return *error;
  // Another caller may still be allocating chunks of the same reserve.
  pool.wait_until_grown();
  return pool.reserved_bytes();
}

}  // namespace torch_ckpt::engine
