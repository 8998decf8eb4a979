#pragma once

#include <pthread.h>
#include <sys/types.h>
#include <unistd.h>

#include "os/mutex.h"

namespace torch_ckpt::os {

// One lazily made T per process, made anew in a forked child: a child must never wait on a thread
// or a lock of its parent. The parent's T is leaked in the child, since its destructor would join
// threads that do not exist there.
// Thread-safe. T is default-constructible; the object lives until the process ends.
template <class T>
class ForkLocal {
 public:
  static T& get() {
    const MutexLock lock(mutex_);
    if (instance_ == nullptr) {
      register_fork_handler();
      instance_ = new T();
    }
    return *instance_;
  }

  /// The object if there is one; for clean-up at exit.
  static T* existing() {
    const MutexLock lock(mutex_);
    return instance_;
  }

 private:
  static void register_fork_handler() {
    // Held across fork so that the child never inherits the mutex locked by a thread it lacks.
    static const int registered = ::pthread_atfork(hold, let_go, begin_child);
    static_cast<void>(registered);
  }
  static void hold() TC_NOT_ANALYZED { mutex_.lock(); }
  static void let_go() TC_NOT_ANALYZED { mutex_.unlock(); }
  static void begin_child() TC_NOT_ANALYZED {
    instance_ = nullptr;
    mutex_.unlock();
  }

  static inline Mutex mutex_;
  static inline T* instance_ TC_GUARDED_BY(mutex_) = nullptr;
};

// Made part of an object that threads of this process work on: tells a forked child, which has a
// copy of the object and none of the threads, that it must not wait for them.
class ProcessMark {
 public:
  bool inherited() const { return ::getpid() != made_in_; }

 private:
  pid_t made_in_ = ::getpid();
};

}  // namespace torch_ckpt::os
