#pragma once

#include <utility>

#include "error.h"
#include "os/directory.h"

namespace torch_ckpt::directory {

// A lock (flock) on the root of a run. Renames of steps and changes of the lease take it. The
// destructor releases it.
class RootLock {
 public:
  /// Waits for up to a second until no other thread or process holds the lock.
  static Result<RootLock> take(const os::Directory& root);

  /// False if another thread or process has held the lock for too long. True if the file system has
  /// no locks: the record in the lease then has to suffice.
  bool is_held() const { return is_held_; }
  /// True if no other process holds the lock.
  bool is_exclusive() const { return is_held_ && opened_.has_locks(); }

 private:
  RootLock(os::Directory opened, bool is_held) : opened_(std::move(opened)), is_held_(is_held) {}

  os::Directory opened_;
  bool is_held_;
};

}  // namespace torch_ckpt::directory
