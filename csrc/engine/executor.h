#pragma once

#include <boost/asio/thread_pool.hpp>
#include <cstddef>

#include "os/priority.h"

namespace torch_ckpt::engine {

/// Which threads do some work. The default is the pool of all work that somebody waits for.
struct Threads {
  os::Priority priority;
  std::size_t count = 0;  // 0: chosen for the machine

  bool operator==(const Threads&) const = default;
};

// The process's thread pools, one for each kind: made lazily, made anew in a forked child (which
// must never wait on a thread of its parent), joined at exit. No thread of them ever takes the GIL.
// Safe for concurrent use by multiple threads.
boost::asio::thread_pool& executor(const Threads& threads = {});

/// Ends the pools after the work they have; for interpreter exit. The next executor() makes a new
/// one.
void join_executor();

/// Threads in a pool: most of them wait for the disk, so there are more than cores.
std::size_t executor_threads();

}  // namespace torch_ckpt::engine
