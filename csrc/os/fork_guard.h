#pragma once

#include <pthread.h>
#include <sys/types.h>
#include <unistd.h>

#include "os/mutex.h"

namespace torch_ckpt::os {

// A lazily constructed T per process. A forked child constructs its own, because it must never wait
// for a thread or lock of its parent. It leaks its copy of the parent's T, whose destructor would
// join threads that do not exist in the child. Thread-safe. T must be default-constructible; the
// object lives until the process ends.
template <class T>
class ForkLocal {
 public:
  static T& get() {
    use_fork_handler();
    const MutexLock lock(mutex_);
    if (instance_ == nullptr) instance_ = new T();
    return *instance_;
  }

  /// Returns the object, or nullptr if it was not constructed; for clean-up at exit.
  static T* existing() {
    use_fork_handler();
    const MutexLock lock(mutex_);
    return instance_;
  }

 private:
  // Instantiates the member, which a template's static member needs to be initialized at all.
  static void use_fork_handler() { static_cast<void>(registered_); }
  static void lock() TC_NOT_ANALYZED { mutex_.lock(); }
  static void unlock() TC_NOT_ANALYZED { mutex_.unlock(); }
  static void begin_child() TC_NOT_ANALYZED {
    instance_ = nullptr;
    mutex_.unlock();
  }

  static inline Mutex mutex_;
  static inline T* instance_ TC_GUARDED_BY(mutex_) = nullptr;
  // Hold the lock across fork, so that no other thread holds it in the child's copy. Register the
  // handlers when the library is loaded: at the first use, another thread could fork between the
  // lock and the registration.
  static inline const int registered_ = ::pthread_atfork(lock, unlock, begin_child);
};

// A member of objects that use threads. inherited() returns true in a forked child, which has a
// copy of the object but none of its threads, and so must not wait for them.
class ProcessMark {
 public:
  bool inherited() const { return ::getpid() != creator_; }
  /// The process that has created the object.
  pid_t creator() const { return creator_; }

 private:
  pid_t creator_ = ::getpid();
};

}  // namespace torch_ckpt::os
