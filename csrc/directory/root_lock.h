#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "error.h"
#include "os/directory.h"

namespace torch_ckpt::directory {

/// The lease on a root (torch_ckpt/steps/lease_protocol.py describes the protocol).
inline constexpr std::string_view kLeaseName = ".lease";

/// The bytes that the lease must have for a change beneath the root; empty if there must be no
/// lease. nullopt: the change does not depend on a lease.
using LeaseBytes = std::optional<std::string>;

// A lock (flock) on the root of a run. Renames of steps and changes of the lease take it. The
// destructor releases it.
class RootLock {
 public:
  static constexpr std::chrono::milliseconds kPatience{1000};

  /// Waits for up to `patience` until no other thread or process holds the lock.
  static Result<RootLock> take(const os::Directory& root,
                               std::chrono::milliseconds patience = kPatience);

  /// False if another thread or process has held the lock for too long. True if the file system has
  /// no locks: the record in the lease then has to suffice.
  bool is_held() const { return is_held_; }
  /// True if no other process holds the lock.
  bool is_exclusive() const { return is_held_ && opened_.has_locks(); }
  /// Releases the lock now.
  void release() { opened_.close(); }

 private:
  RootLock(os::Directory opened, bool is_held) : opened_(std::move(opened)), is_held_(is_held) {}

  os::Directory opened_;
  bool is_held_;
};

/// Checks that the lease on a root has these bytes. If the caller holds the lock on the root, no
/// other run takes the root before the lock is released. Fails with Errc::root_in_use.
Result<> require_lease(const os::Directory& root, const LeaseBytes& lease);

}  // namespace torch_ckpt::directory
