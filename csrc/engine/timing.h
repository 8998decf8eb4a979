#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#include "os/mutex.h"

namespace torch_ckpt::engine {

/// What a thread of a save does at a time.
enum class Activity : std::uint8_t { stage, checksum, write, fsync };
inline constexpr std::size_t kActivities = 4;

/// One stretch of work, for a trace. Times are nanoseconds since the session began.
struct TraceEvent {
  Activity activity = Activity::stage;
  std::size_t file = 0;
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
};

// How long the threads of a session were busy with what, and when it reached its milestones.
// Safe for concurrent use by multiple threads.
class Timing {
 public:
  explicit Timing(bool trace) : trace_(trace) {}

  std::int64_t now_ns() const {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now() - begun_).count();
  }

  void add(Activity activity, std::size_t file, std::int64_t begin_ns, std::int64_t end_ns) {
    busy_ns_[static_cast<std::size_t>(activity)] += end_ns - begin_ns;
    if (!trace_) return;
    const os::MutexLock lock(mutex_);
    try {
      events_.push_back({activity, file, begin_ns, end_ns});
    } catch (const std::bad_alloc&) {
      // The save goes on, and its trace lacks the event.
    }
  }

  /// Nanoseconds of thread time; of threads that work at the same time the sum.
  std::int64_t busy_ns(Activity activity) const {
    return busy_ns_[static_cast<std::size_t>(activity)];
  }

  std::vector<TraceEvent> events() const {
    const os::MutexLock lock(mutex_);
    return events_;
  }

  std::atomic<std::int64_t> staged_ns{0};  // since the session began; 0 before
  std::atomic<std::int64_t> ended_ns{0};

 private:
  const std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
  const bool trace_;
  std::atomic<std::int64_t> busy_ns_[kActivities] = {};
  mutable os::Mutex mutex_;
  std::vector<TraceEvent> events_ TC_GUARDED_BY(mutex_);
};

// Counts the time until it goes out of scope.
class Timed {
 public:
  Timed(Timing& timing, Activity activity, std::size_t file)
      : timing_(timing), activity_(activity), file_(file), begin_ns_(timing.now_ns()) {}
  ~Timed() { timing_.add(activity_, file_, begin_ns_, timing_.now_ns()); }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  Timing& timing_;
  const Activity activity_;
  const std::size_t file_;
  const std::int64_t begin_ns_;
};

}  // namespace torch_ckpt::engine
