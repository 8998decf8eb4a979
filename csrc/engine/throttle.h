#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "os/mutex.h"

namespace torch_ckpt::engine {

// Delays writes so that their average rate stays below a limit.
// Safe for concurrent use by multiple threads.
class Throttle {
 public:
  using Clock = std::chrono::steady_clock;

  /// A rate of 0 means no limit.
  explicit Throttle(std::uint64_t bytes_per_second) : bytes_per_second_(bytes_per_second) {}

  bool limits() const { return bytes_per_second_ != 0; }

  /// Reserves bandwidth for a write of `bytes` and returns the time at which it may begin.
  Clock::time_point reserve(std::uint64_t bytes, Clock::time_point now = Clock::now()) {
    const os::MutexLock lock(mutex_);
    const Clock::time_point begin = std::max(now, free_from_);
    const std::chrono::duration<double> duration(static_cast<double>(bytes) /
                                                 static_cast<double>(bytes_per_second_));
    free_from_ = begin + std::chrono::duration_cast<Clock::duration>(duration);
    return begin;
  }

 private:
  const std::uint64_t bytes_per_second_;
  os::Mutex mutex_;
  Clock::time_point free_from_ TC_GUARDED_BY(mutex_){};
};

}  // namespace torch_ckpt::engine
