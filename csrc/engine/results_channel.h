#pragma once

#include <chrono>
#include <cstddef>
#include <utility>
#include <vector>

#include "error.h"
#include "os/fork_guard.h"
#include "os/mutex.h"

namespace torch_ckpt::engine {

// A channel through which the parts of a session (files or tasks) report to the thread that waits
// for the session. Each part sends exactly one message: its result or its error. The constructor
// allocates all memory, so that sending a message cannot fail. send() may be called from any
// thread; the other methods must all be called from the same thread.
template <class T = void>
class ResultsChannel {
 public:
  explicit ResultsChannel(std::size_t parts)
      : parts_(parts), messages_(parts, Result<T>(Error())) {}

  /// Must be called once per part: a second message would be counted for another part.
  void send(Result<T> message) noexcept {
    // Notify while holding the lock: the waiting thread may destroy the channel as soon as it has
    // the lock.
    const os::MutexLock lock(mutex_);
    if (sent_ == parts_) return;
    messages_[sent_++] = std::move(message);
    if (sent_ == parts_) complete_.notify_all();
  }

  /// Waits until every part has sent its message; returns false if `timeout` expires first. Returns
  /// true immediately in a forked child, which has none of the sending threads.
  bool wait_for(std::chrono::milliseconds timeout) {
    if (inherited()) return true;
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    const os::MutexLock lock(mutex_);
    while (sent_ < parts_ && complete_.wait_until(mutex_, deadline)) continue;
    return sent_ == parts_;
  }

  /// Returns all messages, in the order in which they were sent. Valid once wait_for() has returned
  /// true, but not in a forked child.
  const std::vector<Result<T>>& messages() const TC_NOT_ANALYZED { return messages_; }

  /// True in a forked child, which must treat the session as failed and read none of its other
  /// members: fork() copied them, including locks, while the parent's threads may have been using
  /// them.
  bool inherited() const { return process_.inherited(); }

 private:
  const os::ProcessMark process_;
  const std::size_t parts_;
  os::Mutex mutex_;
  os::CondVar complete_;
  std::vector<Result<T>> messages_ TC_GUARDED_BY(mutex_);  // constant once all have been sent
  std::size_t sent_ TC_GUARDED_BY(mutex_) = 0;
};

}  // namespace torch_ckpt::engine
