#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#include "os/mutex.h"

namespace torch_ckpt::engine {

/// The kinds of work that a save's threads do.
enum class Activity : std::uint8_t { stage, checksum, write, fsync };
inline constexpr std::size_t kActivities = 4;

/// One interval of work, for a trace. Times are in nanoseconds since the session started.
struct TraceEvent {
  Activity activity = Activity::stage;
  std::size_t file = 0;
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
};

// Measures how long a session's threads spend on each activity, and when the session reaches its
// milestones. Safe for concurrent use by multiple threads.
class Timing {
 public:
  explicit Timing(bool trace) : trace_(trace) {}

  std::int64_t now_ns() const {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now() - started_).count();
  }

  void add(Activity activity, std::size_t file, std::int64_t begin_ns, std::int64_t end_ns) {
    busy_ns_[static_cast<std::size_t>(activity)] += end_ns - begin_ns;
    if (!trace_) return;
    const os::MutexLock lock(mutex_);
    try {
      events_.push_back({activity, file, begin_ns, end_ns});
    } catch (const std::bad_alloc&) {
      // Drop the event: an incomplete trace is no reason to fail the save.
    }
  }

  /// Nanoseconds, summed over all threads.
  std::int64_t busy_ns(Activity activity) const {
    return busy_ns_[static_cast<std::size_t>(activity)];
  }

  std::vector<TraceEvent> events() const {
    const os::MutexLock lock(mutex_);
    return events_;
  }

  // Milestones, in nanoseconds since the session started; 0: not reached.
  std::atomic<std::int64_t> staged_ns{0};
  std::atomic<std::int64_t> ended_ns{0};

 private:
  const std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  const bool trace_;
  std::atomic<std::int64_t> busy_ns_[kActivities] = {};
  mutable os::Mutex mutex_;
  std::vector<TraceEvent> events_ TC_GUARDED_BY(mutex_);
};

// Adds the time from its construction to the end of its scope to an activity.
class ScopedTimer {
 public:
  ScopedTimer(Timing& timing, Activity activity, std::size_t file)
      : timing_(timing), activity_(activity), file_(file), begin_ns_(timing.now_ns()) {}
  ~ScopedTimer() { timing_.add(activity_, file_, begin_ns_, timing_.now_ns()); }
  ScopedTimer(const ScopedTimer&) = delete;
  ScopedTimer& operator=(const ScopedTimer&) = delete;

 private:
  Timing& timing_;
  const Activity activity_;
  const std::size_t file_;
  const std::int64_t begin_ns_;
};

}  // namespace torch_ckpt::engine
