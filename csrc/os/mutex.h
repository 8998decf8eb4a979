#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <shared_mutex>

// Locks annotated for clang's thread safety analysis (`make tidy`); the standard library's locks
// have no annotations. Declare members that a mutex guards with TC_GUARDED_BY.

#ifdef __clang__
#define TC_ANNOTATE(attribute) __attribute__((attribute))
#else
#define TC_ANNOTATE(attribute)
#endif

#define TC_GUARDED_BY(mutex) TC_ANNOTATE(guarded_by(mutex))
#define TC_REQUIRES(mutex) TC_ANNOTATE(requires_capability(mutex))
#define TC_NOT_ANALYZED TC_ANNOTATE(no_thread_safety_analysis)

namespace torch_ckpt::os {

class TC_ANNOTATE(capability("mutex")) Mutex {
 public:
  void lock() TC_ANNOTATE(acquire_capability()) { mutex_.lock(); }
  void unlock() TC_ANNOTATE(release_capability()) { mutex_.unlock(); }

 private:
  friend class CondVar;
  std::mutex mutex_;
};

class TC_ANNOTATE(capability("mutex")) SharedMutex {
 public:
  void lock() TC_ANNOTATE(acquire_capability()) { mutex_.lock(); }
  void unlock() TC_ANNOTATE(release_capability()) { mutex_.unlock(); }
  void lock_shared() TC_ANNOTATE(acquire_shared_capability()) { mutex_.lock_shared(); }
  void unlock_shared() TC_ANNOTATE(release_shared_capability()) { mutex_.unlock_shared(); }

 private:
  std::shared_mutex mutex_;
};

template <class Lockable>
class TC_ANNOTATE(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Lockable& mutex) TC_ANNOTATE(acquire_capability(mutex)) : mutex_(mutex) {
    mutex.lock();
  }
  ~MutexLock() TC_ANNOTATE(release_capability()) { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Lockable& mutex_;
};

class TC_ANNOTATE(scoped_lockable) SharedLock {
 public:
  explicit SharedLock(SharedMutex& mutex) TC_ANNOTATE(acquire_shared_capability(mutex))
      : mutex_(mutex) {
    mutex.lock_shared();
  }
  ~SharedLock() TC_ANNOTATE(release_capability()) { mutex_.unlock_shared(); }
  SharedLock(const SharedLock&) = delete;
  SharedLock& operator=(const SharedLock&) = delete;

 private:
  SharedMutex& mutex_;
};

// Waits can wake up spuriously: check the condition again after each wait.
class CondVar {
 public:
  void notify_all() { waiting_.notify_all(); }
  void wait(Mutex& mutex) TC_REQUIRES(mutex) {
    std::unique_lock lock(mutex.mutex_, std::adopt_lock);
    waiting_.wait(lock);
    lock.release();
  }
  /// Returns false if `deadline` has passed.
  bool wait_until(Mutex& mutex, std::chrono::steady_clock::time_point deadline) TC_REQUIRES(mutex) {
    std::unique_lock lock(mutex.mutex_, std::adopt_lock);
    const bool in_time = waiting_.wait_until(lock, deadline) == std::cv_status::no_timeout;
    lock.release();
    return in_time;
  }

 private:
  std::condition_variable waiting_;
};

}  // namespace torch_ckpt::os
