#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "directory/publish.h"
#include "error.h"
#include "os/directory.h"

// The protocol of one checkpoint's directory. A crash at any point leaves either the old checkpoint
// or the new one.
//
//  1. Each rank opens the directory once, by its path, and uses that descriptor for every later
//     call (os/directory.h). So a save stays in one directory, whatever happens to the path.
//  2. The coordinator takes a lease: a shared lock (flock of the directory itself, which creates no
//     file). If files or another save in the directory may use the names of the save's files, the
//     names get a unique tag.
//  3. Every rank writes its data files, fsyncs and closes each, then fsyncs the directory
//     (engine/output_file.h). The coordinator collects the results of all ranks. If a result is
//     missing or failed, nothing below runs, and the old checkpoint stays.
//  4. The coordinator writes the metadata under an unpredictable temporary name, which must not
//     exist (O_EXCL, no links), fsyncs and closes it.
//  5. It fsyncs the directories above, up to the root of the file system: this save, or an earlier
//     one that died, may have created them.
//  6. It checks that the path still leads to the directory: a checkpoint that cannot be found by
//     the caller's path is not committed. It also checks, by one listing of the directory, that
//     each data file that the metadata names exists. Another process may have removed it if rule c
//     does not protect it.
//  7. It renames the temporary file to the metadata's name. If nothing may be replaced, the rename
//     fails if the name is taken. This is the commit point: the last rename decides the content of
//     the checkpoint, and no lock does.
//  8. It fsyncs the directory. Until then a power cut can undo the rename, so only now is the save
//     reported. If this call fails, the checkpoint is visible but perhaps not durable
//     (PublishState::durability_uncertain). Then no file is removed: a power cut may bring back the
//     old checkpoint, which needs its files.
//  9. A commit of all ranks removes the metadata of ranks that saved independently, which it
//     supersedes, and fsyncs the directory. Then it removes temporary files, and data files that no
//     metadata names. A crash in this step leaves unused files; no file that is needed is removed.
//
// Rules for removing files, in step 9 and after a save that failed or died:
//
//  a. A save owns the files that it has created under names of its own. Before its commit it may
//     remove them at any time. Rules b to d apply to all other files.
//  b. A file that any metadata in the directory names stays. Metadata that cannot be read may name
//     any file, so then all files stay.
//  c. Removing a file needs the exclusive lock; every save and load holds the shared one. Files
//     that stay are left to the next save or to remove_leftovers.
//  d. The metadata that is in the directory after the exclusive lock was taken decides: another
//     save may have replaced this save's metadata. The rename of the deciding metadata is fsynced
//     before a file is removed (if PublishMode::sync is false, only if another save renamed it).
//  e. A rank that was declared dead (remove_own) may find files of another save under its names. So
//     rules b and c apply to them, too.
//  f. A save whose lease has ended does not commit: its files may have been removed.
//
// The locks of a process that dies are released once all children have ended that it forked while
// it held them. On a file system without such locks, only rule a permits a removal. If a network
// file system keeps locks within one machine, rule c does not protect against other machines.

namespace torch_ckpt::directory {

/// Returns the data files that a metadata file names, or an error if it cannot be read completely.
using NamedFiles = std::function<Result<std::set<std::string>>(const os::Directory& directory,
                                                               const std::string&)>;

/// Called between two attempts to lock; an error ends the wait.
using InterruptCheck = std::function<Result<>()>;

/// One sentence for each file that could not be removed.
using Warnings = std::vector<std::string>;

/// Takes the shared lock. Returns false if another process holds the exclusive lock for
/// `patience_s` seconds: removing files takes milliseconds, unless that process is stopped.
Result<bool> share(os::Directory& directory, double patience_s,
                   const InterruptCheck& check_interrupt);

// A save's hold on a checkpoint's directory. The coordinator has one; if ranks save independently,
// every rank does.
//
// commit(), abandon() or close() ends it, once. The destructor only closes the descriptor.
class Lease {
 public:
  /// `rank`: the rank whose metadata the save writes; nullopt: the metadata of all ranks. The lease
  /// opens a descriptor of its own.
  static Result<Lease> take(const os::Directory& directory, std::optional<int> rank,
                            double patience_s, const InterruptCheck& check_interrupt);

  /// The text that follows the rank in the names of the save's data files; may be empty.
  const std::string& tag() const { return tag_; }
  const os::Directory& directory() const { return directory_; }

  /// Performs steps 4 to 9 and ends the lease. `contents` is the metadata, `files` are the data
  /// files that it names. If one is missing, nothing is published, with ENOENT. If nothing is
  /// published, the files are removed.
  PublishOutcome commit(std::span<const std::byte> contents, const std::set<std::string>& files,
                        PublishMode mode, const NamedFiles& named, Warnings& warnings);
  /// Ends the lease of a failed save and removes the save's files, of all ranks.
  void abandon(const NamedFiles& named, Warnings& warnings);
  /// Ends the lease and removes nothing: another rank, whose lease protects all files, commits.
  void close() { directory_.close(); }

 private:
  Lease(os::Directory directory, std::optional<int> rank, std::string tag, double patience_s);
  Result<> require_files(const std::set<std::string>& files) const;
  /// The committed metadata and the files that it names.
  struct Committed {
    std::span<const std::byte> contents;
    const std::set<std::string>& files;
  };
  void sweep(const Committed* committed, const NamedFiles& named, Warnings& warnings);
  Result<> remove_unnamed(const Committed* committed, const NamedFiles& named, Warnings& warnings);

  os::Directory directory_;
  std::optional<int> rank_;
  std::string tag_;
  double patience_s_;
};

/// Removes files that no metadata names, which the caller has checked.
void remove_files(const os::Directory& directory, const std::vector<std::string>& names,
                  Warnings& warnings);

/// Removes files that a rank has written for a failed save, if rules b and c permit: if the rank
/// was stopped and declared dead, another save's files may have these names.
void remove_own(const os::Directory& directory, const std::set<std::string>& names,
                const NamedFiles& named, Warnings& warnings);

/// Removes the files of saves that died, and returns their names. Returns nullopt if a save or a
/// load holds the directory's lock. Locks the directory by this descriptor.
Result<std::optional<std::vector<std::string>>> remove_leftovers(os::Directory& directory,
                                                                 const NamedFiles& named);

}  // namespace torch_ckpt::directory
