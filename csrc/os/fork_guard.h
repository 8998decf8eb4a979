#pragma once

#include <pthread.h>
#include <sys/types.h>
#include <unistd.h>

#include <mutex>

namespace torch_ckpt::os {

// One lazily made T per process, made anew in a forked child: a child must never wait on a thread
// or a lock of its parent. The parent's T is leaked in the child, since its destructor would join
// threads that do not exist there.
// Thread-safe. T is default-constructible; the object lives until the process ends.
template <class T>
class ForkLocal {
 public:
  static T& get() {
    std::lock_guard lock(mutex());
    if (slot() == nullptr) {
      register_fork_handler();
      slot() = new T();
    }
    return *slot();
  }

  /// The object if there is one; for clean-up at exit.
  static T* existing() {
    std::lock_guard lock(mutex());
    return slot();
  }

 private:
  static std::mutex& mutex() {
    static std::mutex instance;
    return instance;
  }
  static T*& slot() {
    static T* instance = nullptr;
    return instance;
  }
  static void register_fork_handler() {
    // Held across fork so that the child never inherits the mutex locked by a thread it lacks.
    static const int registered = ::pthread_atfork([] { mutex().lock(); }, [] { mutex().unlock(); },
                                                   [] {
                                                     slot() = nullptr;
                                                     mutex().unlock();
                                                   });
    static_cast<void>(registered);
  }
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
