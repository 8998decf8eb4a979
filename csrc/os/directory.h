#pragma once

#include <sys/types.h>

#include <string>
#include <string_view>
#include <vector>

#include "error.h"
#include "os/beneath.h"
#include "os/file.h"

namespace torch_ckpt::os {

/// mkdir -p. Not durable before Directory::sync_ancestors.
Result<> make_directories(const std::string& path);

/// fsync of the directory at `path`: makes the creations, renames and removals in it survive a
/// power cut.
Result<> sync_directory(const std::string& path);

// A directory that is held open. A path may lead to another directory at any time: somebody renames
// it, retargets a link in it, or changes the working directory. So a path is used once, by open();
// everything after that goes by the descriptor.
//
// Names are those of entries of the directory, never paths. Owns the descriptor.
// Safe for concurrent use by multiple threads, except close(), the locks and moves.
class Directory {
 public:
  /// Links on the way to it are followed: the caller chose the path.
  static Result<Directory> open(const std::string& path);
  /// A second descriptor, which shares this one's lock.
  Result<Directory> duplicate() const;
  /// A second descriptor of the same directory, with a lock of its own.
  Result<Directory> reopen() const;

  Directory(Directory&& other) noexcept;
  Directory& operator=(Directory&& other) noexcept;
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;
  ~Directory();

  /// Lets go of the lock, unless this is a forked child's copy of it. Later calls fail with EBADF.
  void close();

  int fd() const { return fd_; }
  /// As given to open(); for messages.
  const std::string& path() const { return path_; }
  /// Of a file in it; for messages.
  std::string path_of(std::string_view name) const { return path_ + "/" + std::string(name); }

  Result<File> open_for_read(const std::string& name, IoMode mode = IoMode::buffered) const {
    return open_beneath(fd_, path_, name, mode);
  }
  /// As File::create.
  Result<File> create(const std::string& name, IoMode mode) const;

  /// Removes a file; a file that is not there is not an error.
  Result<> remove(const std::string& name) const;
  /// Removes a file if it is that one; no error where it is another or none.
  Result<> remove(const std::string& name, const FileIdentity& identity) const;

  /// Atomic; with `replace` false it fails with EEXIST where there is a `to`. Not durable before
  /// sync().
  Result<> rename(const std::string& from, const std::string& to, bool replace = true) const;

  /// fsync: makes the creations, renames and removals in it survive a power cut.
  Result<> sync() const;

  /// fsync of the directories above this one, by "..", up to the root of its file system: a power
  /// cut cannot take away one that was made lately, by whomever. Those that we may not open were
  /// there before us.
  Result<> sync_ancestors() const;

  /// What is in it, in no order, without "." and "..".
  Result<std::vector<std::string>> names() const;

  Result<FileIdentity> identity() const;
  /// Of what has the name; of a link itself.
  Result<FileIdentity> identity_of(const std::string& name) const;
  /// Whether path() leads to this directory now.
  Result<bool> is_at_path() const;
  /// Where the directory is now; empty where it is not known, or the directory has been removed.
  std::string current_path() const;

  /// Without waiting; false if another descriptor has the directory exclusively. A file system that
  /// has no locks, or none left (ENOLCK), grants a share.
  Result<bool> try_share();
  /// Without waiting; false if another descriptor shares the directory, or may share it: a file
  /// system without locks, or with none left (ENOLCK), does not tell. This descriptor's share is
  /// released.
  Result<bool> try_lock_exclusive();
  /// False if the last attempt to lock has found a file system without locks.
  bool has_locks() const { return has_locks_; }

 private:
  Directory(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  Result<bool> lock(int kind);

  int fd_ = -1;
  pid_t locked_by_ = 0;  // the process that has locked by this descriptor
  bool has_locks_ = true;
  std::string path_;
};

}  // namespace torch_ckpt::os
