#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "error.h"
#include "os/directory.h"
#include "os/file.h"
#include "os/fork_guard.h"

// The lease on a root: only one run at a time may write beneath the root.
//
//  1. Rank 0 of a run that writes creates a file, locks it with flock, and records its identity in
//     it (host, PID and start time). It then renames the file to ".lease".
//  2. A thread touches the file every ten seconds.
//  3. A process that finds a lease checks whether the lease's owner is alive. On the same host, it
//     reads /proc. For another host, it tests the lock if the file system shares locks between
//     hosts. Otherwise, the owner is alive if it touches the file while this process waits, and dead
//     once the file has not been touched for a minute.
//  4. If the owner is dead, its lease is replaced: a new file is renamed over it. The check and the
//     rename happen under a lock on the root (root_lock.h).
//  5. A run whose lease was replaced, for example by a takeover, finds another file in its place.
//     Its saves fail; a save in progress fails before it commits.
//
// A lease belongs to a process. Several managers in one process share it. A forked child has none.

namespace torch_ckpt::directory {

inline constexpr std::string_view kLeaseName = ".lease";

struct LeaseTimes {
  double renew_s = 0;   // between two touches of a lease by its run
  double expiry_s = 0;  // without a touch, after which a lease from another host counts as dead
};

struct ExistingLease;

/// The lease of this process on one root. Thread-safe. release_leases() or the last release() ends
/// it; the process keeps the object alive until then.
class RootLease {
 public:
  ~RootLease();

  /// Checks that this process holds the lease. Fails with Errc::root_in_use if another run has
  /// taken it over, or if this process is a forked child.
  Result<> require() const;

  /// Releases one share. The last one removes the lease, and the root if the lease has created it
  /// and it is empty. Does nothing in a forked child.
  void release();

 private:
  friend class LeaseRequest;
  friend void release_leases();
  friend struct OwnLeases;
  struct Renewal;

  RootLease(std::string root, os::File file, os::FileIdentity identity, bool has_made_root);
  void end();

  const std::string root_;
  os::File file_;
  const os::FileIdentity identity_;
  const bool has_made_root_;
  const os::ProcessMark process_;
  int users_ = 1;
  std::unique_ptr<Renewal> renewal_;
};

/// A request for the lease on a root.
class LeaseRequest {
 public:
  /// takeover: replace the lease of a running job.
  LeaseRequest(std::string root, bool takeover, LeaseTimes times);

  /// Takes the lease, or a share of the lease that this process already holds. Returns nullptr if
  /// it is not known yet whether the holder of the lease is alive: try again later. Fails with
  /// Errc::root_in_use if the holder is alive.
  Result<std::shared_ptr<RootLease>> try_take();

  /// Describes the process that holds the lease, if try_take() has found one.
  const std::string& holder() const { return holder_; }

 private:
  /// A lease that the first try has found.
  struct Seen {
    os::FileIdentity identity;
    std::int64_t touched_ns = 0;
  };

  Result<std::shared_ptr<RootLease>> try_take_in(const os::Directory& root);
  /// Returns true if this request may replace the lease, because its process is dead or because of
  /// a takeover, and false if it is not known yet whether the process is alive.
  /// `file` is a file that was just written.
  Result<bool> may_replace(ExistingLease& found, const os::File& file);

  const std::string root_;
  const bool takeover_;
  const LeaseTimes times_;
  const std::int64_t started_ns_;
  bool has_made_root_ = false;
  std::optional<Seen> first_;
  std::string holder_;
};

/// Ends all leases of this process, for its exit.
void release_leases();

}  // namespace torch_ckpt::directory
