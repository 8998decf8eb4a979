#pragma once

#include <boost/asio/thread_pool.hpp>

namespace torch_ckpt::engine {

// The process's one thread pool: made lazily, made anew in a forked child (which must never wait on
// a thread of its parent), joined at exit. No thread of it ever takes the GIL.
// Safe for concurrent use by multiple threads.
boost::asio::thread_pool& executor();

/// Ends the pool after the work it has; for interpreter exit. The next executor() makes a new one.
void join_executor();

/// Threads in the pool: most of them wait for the disk, so there are more than cores.
std::size_t executor_threads();

}  // namespace torch_ckpt::engine
