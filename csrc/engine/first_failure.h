#pragma once

#include <atomic>
#include <optional>
#include <utility>

#include "error.h"
#include "os/mutex.h"

namespace torch_ckpt::engine {

// The first failure of a session, or of other work shared by several threads. Threads poll is_set()
// and stop once it returns true. Safe for concurrent use by multiple threads.
template <class Failure = Error>
class FirstFailure {
 public:
  /// Records a failure. Does nothing after an earlier failure or after close().
  void set(Failure failure) noexcept {
    const os::MutexLock lock(mutex_);
    if (is_closed_ || failure_) return;
    failure_ = std::move(failure);
    is_set_ = true;
  }
  bool is_set() const { return is_set_; }

  std::optional<Failure> get() const {
    const os::MutexLock lock(mutex_);
    return failure_;
  }

  /// Makes set() ignore all later failures. Returns true if a failure was recorded.
  bool close() {
    const os::MutexLock lock(mutex_);
    is_closed_ = true;
    return is_set_;
  }
  bool is_closed() const {
    const os::MutexLock lock(mutex_);
    return is_closed_;
  }

 private:
  mutable os::Mutex mutex_;
  std::optional<Failure> failure_ TC_GUARDED_BY(mutex_);
  bool is_closed_ TC_GUARDED_BY(mutex_) = false;
  std::atomic<bool> is_set_{false};
};

}  // namespace torch_ckpt::engine
