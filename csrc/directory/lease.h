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
//  1. Each rank opens the directory once, by its path. From then on every call goes by that
//     descriptor (os/directory.h): a save stays in one directory whatever becomes of its path.
//  2. The coordinator takes a lease: it shares the directory (flock of the directory itself, so
//     that nothing is left behind). Where the names of the save's files might be taken, by what is
//     there or by another save, they get a tag that nobody else has.
//  3. Every rank writes its data files, fsyncs and closes each, then fsyncs the directory
//     (engine/output_file.h). All ranks' results arrive at the coordinator. One missing or
//     failed result aborts: nothing below runs, and there is no checkpoint but the old one.
//  4. The coordinator writes the metadata under a temporary name that nobody can guess and that
//     does not exist (O_EXCL, no links), fsyncs and closes it.
//  5. It fsyncs the directories above, up to the root of the file system: this save may have made
//     them, or one before it that died.
//  6. It looks whether the path still leads to the directory. A checkpoint that nobody would find
//     under the path that the caller gave is not committed.
//     Then it finds each data file that the metadata names, by one listing of the directory: what
//     c below does not protect, another process may have removed.
//  7. It renames the temporary file to the metadata's name; where nothing may be replaced, by a
//     rename that fails if the name is taken. This is the commit point. No lock decides what the
//     checkpoint is: the last rename does.
//  8. It fsyncs the directory. Without this a power cut undoes the rename, so only now is the save
//     reported. If this one call fails the checkpoint is visible but perhaps not durable:
//     PublishState::durability_uncertain. Then no file goes: a power cut may bring back the old
//     checkpoint, which needs its files.
//  9. A commit of all ranks removes the metadata of single ranks, which it has superseded, and
//     fsyncs the directory. Then temporary files go, and data files that no metadata names any
//     more. A crash before or amid this leaves unused files, never a missing one.
//
// What may be removed, in step 9 and where a save has failed or died:
//
//  a. A save knows the files as its own that it has made under names of its own. Before its commit
//     it may remove those at any time. For all other files b to d hold.
//  b. A file that any metadata in the directory names stays. Metadata that cannot be read may name
//     any file, so then all stay.
//  c. A file goes only while nobody else shares the directory, as every save and load does. What
//     stays is for the next save, or for remove_leftovers.
//  d. What counts is the metadata that is there once the save has the directory alone: its own may
//     have been replaced by then. The rename of metadata that counts is fsynced before a file goes
//     (with PublishMode::sync false, only the metadata of others).
//  e. A rank that was given up (remove_own) may find files of another save under its names. So b
//     and c hold for them, too.
//  f. A save whose lease has ended, and whose files may have gone, commits nothing.
//
// A process that dies lets go of its locks, once the children have ended that it forked meanwhile.
// Where the file system has no such locks, c holds: no file goes but by a. Where it keeps them
// within one machine (some network file systems), c does not protect.

namespace torch_ckpt::directory {

/// The data files that the metadata of that name names; an error where it cannot be read whole.
using NamedFiles = std::function<Result<std::set<std::string>>(const os::Directory& directory,
                                                               const std::string&)>;

/// Called between two looks at a lock; an error ends the wait.
using Between = std::function<Result<>()>;

/// What could not be removed, one sentence each.
using Warnings = std::vector<std::string>;

/// False where somebody else has had the directory alone for so many seconds: the process that
/// removes files takes milliseconds, unless it is stopped.
Result<bool> share(os::Directory& directory, double patience_s, const Between& between);

// A save's part in a directory: of the coordinator, or of each rank where ranks save alone.
//
// It ends once, by one of the methods that say so; the destructor only closes the descriptor.
class Lease {
 public:
  /// `rank`: whose metadata it will be; nullopt: that of all ranks. The lease has a descriptor of
  /// its own.
  static Result<Lease> take(const os::Directory& directory, std::optional<int> rank,
                            double patience_s, const Between& between);

  /// What goes behind the rank in the names of the save's data files; may be empty.
  const std::string& tag() const { return tag_; }
  const os::Directory& directory() const { return directory_; }

  /// Steps 4 to 9, and the end. `files` are those that the metadata in `contents` names. They are
  /// removed where nothing is published: as with ENOENT, if one of them is not there.
  PublishOutcome commit(std::span<const std::byte> contents, const std::set<std::string>& files,
                        PublishMode mode, const NamedFiles& named, Warnings& warnings);
  /// Ends the lease of a save that has failed: its files go, whichever rank wrote them.
  void abandon(const NamedFiles& named, Warnings& warnings);
  /// Ends it and removes nothing: another rank, whose lease protects all, commits.
  void close() { directory_.close(); }

 private:
  Lease(os::Directory directory, std::optional<int> rank, std::string tag, double patience_s);
  Result<> require(const std::set<std::string>& files) const;
  /// What has been committed, with the files that it names.
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

/// Removes files that are known to be named by no metadata.
void remove_files(const os::Directory& directory, const std::vector<std::string>& names,
                  Warnings& warnings);

/// Removes files that a rank has written for a save that failed: this rank may have been stopped
/// and given up, and what has its names by now may be another save's, so b and c hold.
void remove_own(const os::Directory& directory, const std::set<std::string>& names,
                const NamedFiles& named, Warnings& warnings);

/// Removes the files of saves that died, and returns their names. nullopt where a save or a load is
/// under way. Takes the lock of this descriptor.
Result<std::optional<std::vector<std::string>>> remove_leftovers(os::Directory& directory,
                                                                 const NamedFiles& named);

}  // namespace torch_ckpt::directory
