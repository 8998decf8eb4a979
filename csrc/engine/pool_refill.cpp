#include "engine/pool_refill.h"

#include <boost/asio/post.hpp>

namespace torch_ckpt::engine {
namespace {

// One thread: no caller waits for it, and drivers page-lock memory for one thread at a time.
constexpr PoolSpec kThread{{19, true}, 1};

/// Allocates one chunk or arena, and posts itself again.
void refill_step(Context& context, boost::asio::io_context& pool) noexcept {
  try {
    const auto grown = context.chunks.grow_refill();
    if (!grown || !*grown) return;
    boost::asio::post(pool, [&context, &pool] { refill_step(context, pool); });
  } catch (...) {
    context.chunks.cancel_refill();
  }
}

}  // namespace

void refill_pool(Context& context) noexcept {
  try {
    if (!context.chunks.has_refill()) return;
    if (!context.executor.ensure_threads(kThread, 1)) return;
    boost::asio::io_context& pool = context.executor.pool(kThread);
    boost::asio::post(pool, [&context, &pool] { refill_step(context, pool); });
  } catch (...) {
    context.chunks.cancel_refill();
  }
}

}  // namespace torch_ckpt::engine
