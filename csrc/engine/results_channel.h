#pragma once

#include <chrono>
#include <cstddef>
#include <utility>
#include <vector>

#include "error.h"
#include "os/fork_guard.h"
#include "os/mutex.h"

namespace torch_ckpt::engine {

// The channel through which the parts of a session (files or tasks) report to the thread that waits
// for it. Each part sends exactly one message: its result or its error.
// The constructor allocates all memory, so that sending a message cannot fail. Waiting needs no
// additional thread.
// send() may be called from any thread, the other methods from one.
template <class T = void>
class ResultsChannel {
 public:
  explicit ResultsChannel(std::size_t parts)
      : parts_(parts), messages_(parts, Result<T>(Error())) {}

  /// Sending twice for one part is a bug: the second message would count for another part.
  void send(Result<T> message) noexcept {
    // Notifies under the lock: the waiting thread may destroy the channel once it has the lock.
    const os::MutexLock lock(mutex_);
    if (sent_ == parts_) return;
    messages_[sent_++] = std::move(message);
    if (sent_ == parts_) complete_.notify_all();
  }

  /// Waits until every part has sent its message; returns false if `timeout` passes first. Returns
  /// true at once in a forked child, which has none of the sending threads.
  bool wait_for(std::chrono::milliseconds timeout) {
    if (inherited()) return true;
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    const os::MutexLock lock(mutex_);
    while (sent_ < parts_ && complete_.wait_until(mutex_, deadline)) continue;
    return sent_ == parts_;
  }

  /// All messages, in the order in which they were sent. Valid once wait_for() has returned true,
  /// and not in a forked child.
  const std::vector<Result<T>>& messages() const TC_NOT_ANALYZED { return messages_; }

  /// True in a forked child. Treat the session as failed there and read none of its other members:
  /// fork() has copied them, locks included, at some moment of the parent's work.
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
