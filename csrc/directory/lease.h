#pragma once

#include <cstddef>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "directory/publish.h"
#include "error.h"
#include "interrupt_check.h"
#include "os/directory.h"

// The protocol for a checkpoint's directory. A crash at any point leaves either the old checkpoint
// or the new one.
//
//  1. Each rank opens the directory once by its path, and uses this descriptor in all later calls
//     (os/directory.h). So a save stays in one directory, whatever happens to the path.
//  2. The coordinator takes a lease: a shared lock on the directory (os/directory.h). If existing
//     files or another save in the directory might use the names of this save's files, the names
//     get a unique tag.
//  3. Every rank writes its data files, fsyncs and closes each, then fsyncs the directory
//     (engine/output_file.h). The coordinator collects the results of all ranks. If a result is
//     missing or a rank has failed, the steps below are skipped and the old checkpoint stays.
//  4. The coordinator writes the metadata under an unpredictable temporary name, which must not
//     exist (O_EXCL, no links), fsyncs the file and closes it.
//  5. The coordinator fsyncs the parent directories, up to the root of the file system: this save
//     or an earlier interrupted save may have created them.
//  6. The coordinator checks that the path still refers to the directory, because a checkpoint that
//     the caller cannot find by its path must not be committed. With one listing of the directory,
//     it also checks that every data file named in the metadata exists. Where rule c does not
//     protect the files, another process may have removed some.
//  7. The coordinator renames the temporary file to the metadata's name. If nothing may be replaced,
//     the rename fails if the name exists. This is the commit point: the last rename, not a lock,
//     decides which checkpoint the directory contains.
//  8. The coordinator fsyncs the directory. Only then is the save reported as successful, because a
//     power cut could undo the rename before. If this fsync fails, the checkpoint is visible but may
//     not be durable (PublishState::durability_uncertain). Then no file is removed: a power cut may
//     bring back the old checkpoint, which needs its files.
//  9. A commit of all ranks supersedes the metadata of ranks that saved independently, so it removes
//     that metadata and fsyncs the directory. Then it removes temporary files, and data files that no
//     metadata names. A crash in this step leaves unused files, but never removes a needed file.
//
// Rules for removing files, in step 9 and after a failed or interrupted save:
//
//  a. A save owns the files that it created under its own names. It may remove them at any time
//     before its commit. Rules b to d apply to all other files.
//  b. A file that any metadata in the directory names is kept. If any metadata cannot be read, all
//     files are kept, because it may name any of them.
//  c. Removing a file requires the exclusive lock; every save and load holds the shared lock. Files
//     that cannot be removed are left to the next save or to remove_leftovers.
//  d. What counts is the metadata in the directory after the exclusive lock was taken: another save
//     may have replaced this save's metadata. The rename of that metadata is fsynced before a file
//     is removed (if PublishMode::sync is false, only if another save renamed it).
//  e. If a rank was declared dead, another save may have created files under its names. So
//     remove_own follows rules b and c for them as well.
//  f. A save whose lease has ended does not commit: its files may have been removed.
//  g. If other hosts may use the directory (Directory::is_local() is false), the file system may
//     hide their locks. So all names of data files get a tag, and removing a file also requires
//     that the save has written it, that the metadata which the save has replaced names it, or that
//     it is an hour older than the newest file of the directory.
//
// The locks of a dead process are released only after all children that it forked while holding
// them have ended. On a file system without locks, files can be removed only under rule a.

namespace torch_ckpt::directory {

/// Returns the data files that a metadata file names, or an error if any of it cannot be read.
using NamedFiles = std::function<Result<std::set<std::string>>(const os::Directory& directory,
                                                               const std::string&)>;

/// Reads and decodes a metadata file. Fails if it cannot be read and decoded completely.
Result<std::set<std::string>> named_files(const os::Directory& directory, const std::string& name);

/// Returns the files that a directory lacks, sorted.
Result<std::vector<std::string>> find_missing(const os::Directory& directory,
                                              const std::set<std::string>& files);

/// One sentence for each file that could not be removed.
using Warnings = std::vector<std::string>;

/// Takes the shared lock. Returns false if other processes hold the exclusive lock for `patience_s`
/// seconds. Calls `check_interrupt` between attempts. Removing files under that lock takes
/// milliseconds, unless the process is suspended.
Result<bool> share(os::Directory& directory, double patience_s,
                   const InterruptCheck& check_interrupt);

// A save's hold on a checkpoint's directory. The coordinator has a lease; if ranks save
// independently, every rank has one.
//
// End a lease with exactly one call of commit(), discard() or close(). The destructor only closes
// the descriptor.
class DirectoryLease {
 public:
  /// Opens its own descriptor of the directory. rank: the rank whose metadata the save writes;
  /// nullopt for the metadata of all ranks.
  static Result<DirectoryLease> take(const os::Directory& directory, std::optional<int> rank,
                                     double patience_s, const InterruptCheck& check_interrupt);

  /// The text after the rank in the names of the save's data files; may be empty.
  const std::string& tag() const { return tag_; }
  const os::Directory& directory() const { return directory_; }

  /// Performs steps 4 to 9 and ends the lease. `contents` is the metadata, and `files` are the data
  /// files that it names. If a file is missing, fails with ENOENT and publishes nothing. If nothing
  /// is published, removes the files.
  PublishOutcome commit(Pieces contents, const std::set<std::string>& files, PublishMode mode,
                        const NamedFiles& named, Warnings& warnings);
  /// Ends the lease of a failed save and removes the save's files on all ranks.
  void discard(const NamedFiles& named, Warnings& warnings);
  /// Ends the lease without removing files; for ranks that do not commit, because the lease of the
  /// committing rank protects all files.
  void close() { directory_.close(); }

 private:
  DirectoryLease(os::Directory directory, std::optional<int> rank, std::string tag,
                 double patience_s);
  Result<> require_files(const std::set<std::string>& files) const;
  /// The committed metadata and the files that it names.
  struct Committed {
    Pieces contents;
    const std::set<std::string>& files;
  };
  void sweep(const Committed* committed, const NamedFiles& named, Warnings& warnings);
  Result<> remove_unnamed(const Committed* committed, const NamedFiles& named, Warnings& warnings);
  bool may_remove(const std::string& file) const;

  os::Directory directory_;
  std::optional<int> rank_;
  std::string tag_;
  double patience_s_;
  std::set<std::string> replaced_;  // files that the replaced metadata names, for rule g
};

/// Removes files. The caller has checked that no metadata names them.
void remove_files(const os::Directory& directory, const std::vector<std::string>& names,
                  Warnings& warnings);

/// Removes the files that a rank wrote for a failed save, as far as rules b and c permit: if the
/// rank was suspended and declared dead, another save's files may have the same names.
void remove_own(const os::Directory& directory, const std::set<std::string>& names,
                const NamedFiles& named, Warnings& warnings);

/// Removes the files of interrupted saves, and returns their names. Returns nullopt if a save or
/// load holds the directory's lock. Locks the directory through the descriptor of `directory`.
Result<std::optional<std::vector<std::string>>> remove_leftovers(os::Directory& directory,
                                                                 const NamedFiles& named);

}  // namespace torch_ckpt::directory
