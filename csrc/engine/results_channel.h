#pragma once

#include <chrono>
#include <cstddef>
#include <utility>
#include <vector>

#include "error.h"
#include "os/fork_guard.h"
#include "os/mutex.h"

namespace torch_ckpt::engine {

// The channel on which the parts of a session report to whoever waits for it: each sends exactly
// one message, which is its result or its error.
// All memory is there from the beginning, so that no message can be lost or refused, and waiting
// takes no thread but the one that waits.
// send() may be called from any thread, the other methods from one.
template <class T = void>
class ResultsChannel {
 public:
  explicit ResultsChannel(std::size_t parts)
      : parts_(parts), messages_(parts, Result<T>(Error())) {}

  /// A part that sends twice is a bug; its second message would be another part's.
  void send(Result<T> message) noexcept {
    // Under the lock to the end: whoever waits may destroy the channel as soon as he has the lock.
    const os::MutexLock lock(mutex_);
    if (sent_ == parts_) return;
    messages_[sent_++] = std::move(message);
    if (sent_ == parts_) complete_.notify_all();
  }

  /// Waits until every part has sent its message; false when `timeout` passed before. True at once
  /// in a forked child, where the threads that would send them do not exist.
  bool wait_for(std::chrono::milliseconds timeout) {
    if (inherited()) return true;
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    const os::MutexLock lock(mutex_);
    while (sent_ < parts_ && complete_.wait_until(mutex_, deadline)) continue;
    return sent_ == parts_;
  }

  /// In the order in which they were sent; after wait_for() has returned true, and not in a forked
  /// child.
  const std::vector<Result<T>>& messages() const TC_NOT_ANALYZED { return messages_; }

  /// Whether this is such a child. A session has then failed, whatever its members say: they were
  /// copied at some moment of the parent's work, locks included.
  bool inherited() const { return process_.inherited(); }

 private:
  const os::ProcessMark process_;
  const std::size_t parts_;
  os::Mutex mutex_;
  os::CondVar complete_;
  std::vector<Result<T>> messages_ TC_GUARDED_BY(mutex_);  // until all have been sent
  std::size_t sent_ TC_GUARDED_BY(mutex_) = 0;
};

}  // namespace torch_ckpt::engine
