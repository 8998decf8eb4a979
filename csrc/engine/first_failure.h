#pragma once

#include <atomic>
#include <optional>
#include <utility>

#include "error.h"
#include "os/mutex.h"

namespace torch_ckpt::engine {

// Why a session, or another work of several threads, has failed: the first failure counts, and who
// sees that there is one stops. Safe for concurrent use by multiple threads.
template <class Failure = Error>
class FirstFailure {
 public:
  /// Does nothing after another failure, nor after end().
  void set(Failure failure) noexcept {
    const os::MutexLock lock(mutex_);
    if (has_ended_ || failure_) return;
    failure_ = std::move(failure);
    is_set_ = true;
  }
  bool is_set() const { return is_set_; }

  std::optional<Failure> get() const {
    const os::MutexLock lock(mutex_);
    return failure_;
  }

  /// Lets it stand whether there has been one, and says so.
  bool end() {
    const os::MutexLock lock(mutex_);
    has_ended_ = true;
    return is_set_;
  }
  bool has_ended() const {
    const os::MutexLock lock(mutex_);
    return has_ended_;
  }

 private:
  mutable os::Mutex mutex_;
  std::optional<Failure> failure_ TC_GUARDED_BY(mutex_);
  bool has_ended_ TC_GUARDED_BY(mutex_) = false;
  std::atomic<bool> is_set_{false};
};

}  // namespace torch_ckpt::engine
