#pragma once

#include <sys/types.h>

#include <string>
#include <string_view>
#include <vector>

#include "error.h"
#include "os/beneath.h"
#include "os/file.h"

namespace torch_ckpt::os {

/// Creates a directory and its parents, like mkdir -p. Only sync_ancestors() makes them durable.
Result<> make_directories(const std::string& path);

/// Fsyncs the directory at `path`: creations, renames and removals in it then survive a power cut.
Result<> sync_directory(const std::string& path);

// An open directory. A path may lead to another directory at any time, because a directory is
// renamed, a link is changed or the working directory changes. So only open() uses the path; all
// other calls use the descriptor.
//
// Names are names of entries in the directory, never paths. Owns the descriptor.
// Safe for concurrent use by multiple threads, except close(), the locks and moves.
class Directory {
 public:
  /// Opens a directory. Follows links in the path, because the caller chose it.
  static Result<Directory> open(const std::string& path);
  /// Returns a second descriptor, which shares this one's lock.
  Result<Directory> duplicate() const;
  /// Returns a second descriptor of the same directory, with a lock of its own.
  Result<Directory> reopen() const;

  Directory(Directory&& other) noexcept;
  Directory& operator=(Directory&& other) noexcept;
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;
  ~Directory();

  /// Closes the descriptor and releases the lock, unless this is a forked child's copy. Later calls
  /// fail with EBADF.
  void close();

  int fd() const { return fd_; }
  /// The path that was given to open(); for messages.
  const std::string& path() const { return path_; }
  /// The path of a file in the directory; for messages.
  std::string path_of(std::string_view name) const { return path_ + "/" + std::string(name); }

  Result<File> open_for_read(const std::string& name, IoMode mode = IoMode::buffered) const {
    return open_beneath(fd_, path_, name, mode);
  }
  /// Like File::create(), in the directory.
  Result<File> create(const std::string& name, IoMode mode) const;

  /// Removes a file. A missing file is not an error.
  Result<> remove(const std::string& name) const;
  /// Removes a file if it has this identity. A different or missing file is not an error.
  Result<> remove(const std::string& name, const FileIdentity& identity) const;

  /// Renames a file atomically. If `replace` is false and `to` exists, fails with EEXIST. Call
  /// sync() to make the rename durable.
  Result<> rename(const std::string& from, const std::string& to, bool replace = true) const;

  /// Fsyncs the directory, so that creations, renames and removals in it survive a power cut.
  Result<> sync() const;

  /// Fsyncs the directories above this one, by "..", up to the root of the file system, so that
  /// recently created ones survive a power cut. Skips directories without permission: this process
  /// cannot have created them.
  Result<> sync_ancestors() const;

  /// Returns the names of all entries but "." and "..", in no particular order.
  Result<std::vector<std::string>> names() const;

  Result<FileIdentity> identity() const;
  /// Identity of the entry with this name; of a link itself, not of its target.
  Result<FileIdentity> identity_of(const std::string& name) const;
  /// Returns true if path() leads to this directory now.
  Result<bool> is_at_path() const;
  /// The directory's present path; empty if it is unknown or the directory was removed.
  std::string current_path() const;

  /// Tries to take the shared lock, without waiting. Returns false if another descriptor has the
  /// exclusive lock. Returns true if the file system has no locks, or none left (ENOLCK).
  Result<bool> try_share();
  /// Tries to take the exclusive lock, without waiting; releases this descriptor's shared lock.
  /// Returns false if another descriptor has a lock, or if there are no locks (see try_share()).
  Result<bool> try_lock_exclusive();
  /// False if the last attempt to lock found that the file system has no locks.
  bool has_locks() const { return has_locks_; }

 private:
  Directory(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  Result<bool> lock(int kind);

  int fd_ = -1;
  pid_t locked_by_ = 0;  // the process that took the lock
  bool has_locks_ = true;
  std::string path_;
};

}  // namespace torch_ckpt::os
