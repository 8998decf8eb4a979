#pragma once

#include <boost/asio/io_context.hpp>
#include <cstddef>
#include <functional>
#include <memory>
#include <string_view>

#include "error.h"
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
// Where the system refuses threads, a pool works with those it has, and one that has none leaves
// its work to another pool: no work may wait for other work that has not begun.
// Safe for concurrent use by multiple threads.
boost::asio::io_context& executor(const Threads& threads = {});

/// Before work is given to executor(threads): fails where there is no thread to do it. A pool whose
/// count is chosen for the machine is enlarged so that it has threads left beside `waiting` ones
/// that wait for a disk.
Result<> need_threads(const Threads& threads, std::size_t waiting);

/// Gets what keeps the threads that the pool has for it.
using LongTask = std::function<void(std::shared_ptr<const void> threads)>;

/// Posts `count` tasks of `operation` to the default pool that keep a thread until they end, as
/// those of a load. The pool gets as many threads more, so that nothing else waits for them; it has
/// these for as long as a task keeps what it was given. Fails where there is no thread at all. A
/// task that cannot be posted is `refused`: those before it work on what the caller has given.
Result<> post_long_tasks(std::size_t count, std::string_view operation, const LongTask& task,
                         const std::function<void(Error)>& refused);

/// Ends the pools after the work they have; for interpreter exit. The next executor() makes a new
/// one.
void join_executor();

/// Threads in a pool: most of them wait for the disk, so there are more than cores.
std::size_t executor_threads();

}  // namespace torch_ckpt::engine
