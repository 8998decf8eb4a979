#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "directory/lease.h"
#include "directory/publish.h"
#include "directory/root_lock.h"
#include "directory/step_names.h"
#include "error.h"
#include "interrupt_check.h"
#include "os/directory.h"
#include "os/mutex.h"

// The protocol for the steps of a run beneath a local root. Each step is a directory with a name of
// ten digits. A crash at any point leaves each step either complete or absent. Leftovers have
// distinct names.
//
//  1. Step 100 is written into "0000000100.tmp-{attempt}", like any checkpoint (lease.h). The
//     attempt is 8 hex digits on which the ranks of a run have agreed. It keeps the files of this
//     run separate from the files of earlier and concurrent runs.
//  2. Once the files of all ranks are durable and the metadata is committed, the coordinator writes
//     "write_completed" next to them: a JSON document that describes the step. It fsyncs the file,
//     then the directory.
//  3. Under a lock on the root (root_lock.h), the coordinator checks that the run still holds the
//     lease, and renames the directory to "0000000100". It fsyncs the root. Only then is the save
//     committed on all ranks. If a step is replaced, it is first renamed as in 5, and a pin of it is
//     kept.
//  4. A step is complete if its name is ten digits and it contains the marker. No other directory is
//     listed as a step.
//  5. A deletion locks the directory exclusively (lease.h), so it never deletes a step that is being
//     loaded. It renames the directory to "0000000100.deleted-{8 hex digits}", fsyncs the root, then
//     deletes the files. After a power failure, there is either the complete step or a leftover.
//     Deletions, too, check the lease and rename under the lock on the root, so a deletion never
//     renames a new step, and no run that has lost the lease deletes one.
//  6. A directory whose name is ten digits but which lacks the marker was not written by a manager.
//     It is kept until that step is saved.
//  7. A sweep finishes interrupted work. A directory with the marker that was not renamed in 3 gets
//     its final name if that step does not exist, and if no run of a later epoch has completed
//     steps. Other leftovers are deleted. Directories that a process is using are spared; without
//     locks, all unfinished directories are.
//  8. If a save fails before 3, its directory is removed, marker first, even if it was moved. If the
//     replaced step could not be renamed back, the new step is complete, and 7 renames it.

namespace torch_ckpt::directory {

/// Pins a step, and makes the pin durable.
Result<> pin(const os::Directory& step);

/// The directory of a run's steps. Thread-safe.
class StepRoot {
 public:
  explicit StepRoot(std::string path) : path_(std::move(path)) {}

  const std::string& path() const { return path_; }
  /// Records the directory in which a save has published a step. If path() refers to a different
  /// directory later, nothing is removed from there.
  void remember(const os::FileIdentity& identity);

  /// Removes a step or leftover. Returns false if a process is using it, or if a save has replaced
  /// it meanwhile. Fails with Errc::root_in_use if the lease on the root has other bytes.
  Result<bool> remove(const std::string& name, const LeaseBytes& lease = {}) const;

  struct Sweep {
    std::vector<std::string> removed;  // names of the removed leftovers
    std::vector<Error> failures;       // of leftovers that could not be removed
  };
  /// Finishes interrupted work, as in 7. With `deleted_only`, only finishes deletions. Spares the
  /// unfinished steps of this attempt: a rank of this run may have created the directory, but not
  /// locked it yet. Never completes the directories in `superseded`.
  Result<Sweep> sweep(bool deleted_only, const std::string& attempt, const LeaseBytes& lease = {},
                      const std::set<std::string>& superseded = {}) const;

 private:
  const std::string path_;
  mutable os::Mutex mutex_;
  std::optional<os::FileIdentity> identity_ TC_GUARDED_BY(mutex_);
};

/// The coordinator's part of a save after all ranks have written their files: 2, 3 and 8. Holds a
/// shared lock on the directory until publish() or discard(), because the save's lease ends when
/// the metadata is committed.
class StepSave {
 public:
  /// `unfinished` is the directory in which the save has written. `steps` must outlive the result.
  static Result<StepSave> begin(StepRoot& steps, const os::Directory& unfinished,
                                const std::string& digits);

  /// Waits until the directory contains these files. Returns the missing ones if that takes longer
  /// than `patience_s`: network file systems may cache the absence of a file for some time.
  Result<std::vector<std::string>> find_missing(const std::set<std::string>& files,
                                                double patience_s,
                                                const InterruptCheck& check_interrupt) const;
  /// Returns the total size of the files.
  Result<std::uint64_t> bytes() const { return directory_.bytes(); }

  /// Completes the step after the metadata was committed. If a complete step may not be replaced,
  /// fails with EEXIST. If the lease on the root has other bytes, fails with Errc::root_in_use. If
  /// nothing is published, removes the files, except as in 8.
  PublishOutcome publish(std::string_view marker, bool may_replace, bool sync,
                         const LeaseBytes& lease = {});
  /// True once publish() has renamed the directory, or may have done so.
  bool is_published() const { return is_published_; }
  /// The new name of the step that was replaced; empty if there was none.
  const std::string& replaced() const { return replaced_; }

  /// Removes the files of a save that has failed before publish(); does nothing after it.
  void discard();

 private:
  StepSave(StepRoot& steps, os::Directory root, os::Directory directory, std::string digits,
           std::string unfinished);
  PublishOutcome try_publish(std::string_view marker, bool may_replace, bool sync,
                             const LeaseBytes& lease);
  Result<> remove_files();
  void close();

  StepRoot* steps_;
  os::Directory root_;
  os::Directory directory_;
  std::string digits_;
  std::string unfinished_;
  std::string replaced_;
  bool is_published_ = false;
  bool has_ended_ = false;
};

}  // namespace torch_ckpt::directory
