#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace torch_ckpt::engine {

/// The kinds of work that a save's threads do.
enum class Activity : std::uint8_t { stage, checksum, write, fsync };
inline constexpr std::size_t kActivities = 4;

// Measures how long a session's threads spend on each activity, and when the session reaches its
// milestones. Safe for concurrent use by multiple threads.
class Timing {
 public:
  std::int64_t now_ns() const {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now() - started_).count();
  }

  void add(Activity activity, std::int64_t duration_ns) {
    busy_ns_[static_cast<std::size_t>(activity)] += duration_ns;
  }

  /// Nanoseconds, summed over all threads.
  std::int64_t busy_ns(Activity activity) const {
    return busy_ns_[static_cast<std::size_t>(activity)];
  }

  // Milestones, in nanoseconds since the session started; 0: not reached.
  std::atomic<std::int64_t> staged_ns{0};
  std::atomic<std::int64_t> ended_ns{0};

 private:
  const std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  std::atomic<std::int64_t> busy_ns_[kActivities] = {};
};

// Adds the time from its construction to the end of its scope to an activity.
class ScopedTimer {
 public:
  ScopedTimer(Timing& timing, Activity activity)
      : timing_(timing), activity_(activity), begin_ns_(timing.now_ns()) {}
  ~ScopedTimer() { timing_.add(activity_, timing_.now_ns() - begin_ns_); }
  ScopedTimer(const ScopedTimer&) = delete;
  ScopedTimer& operator=(const ScopedTimer&) = delete;

 private:
  Timing& timing_;
  const Activity activity_;
  const std::int64_t begin_ns_;
};

}  // namespace torch_ckpt::engine
