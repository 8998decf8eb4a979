#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "error.h"
#include "os/beneath.h"
#include "os/file.h"

namespace torch_ckpt::os {

/// The file in a directory of a network file system that carries the directory's lock.
inline constexpr std::string_view kLockName = ".lock";

/// Creates a directory and its parents, like mkdir -p. Only sync_ancestors() makes them durable.
Result<> make_directories(const std::string& path);

// An open directory. A path can refer to a different directory at any time: a directory may be
// renamed, a link retargeted or the working directory changed. So only open() and is_at_path() use
// the path; all other calls use the descriptor.
//
// Names are relative to the directory and may contain slashes. Owns the descriptor. Safe for
// concurrent use by multiple threads, except for close(), locking and moves.
//
// For some time, the client of a network file system uses the entry that it has found last under a
// name, although another host has replaced the entry. refresh() makes the client look the name up
// again. The calls that open a directory or return an identity do this themselves.
class Directory {
 public:
  /// Opens a directory. Follows links in the path, because the caller chose it.
  static Result<Directory> open(const std::string& path);
  /// Returns a second descriptor that shares this descriptor's lock.
  Result<Directory> duplicate() const;
  /// Returns a second descriptor of the same directory, which has its own lock.
  Result<Directory> reopen() const;

  Directory(Directory&& other) noexcept;
  Directory& operator=(Directory&& other) noexcept;
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;
  ~Directory();

  /// Closes the descriptor and releases the lock; a forked child does not release its parent's
  /// lock. Later calls fail with EBADF.
  void close();

  int fd() const { return fd_; }
  /// The path passed to open(); for messages.
  const std::string& path() const { return path_; }
  /// The path of a file in the directory; for messages.
  std::string path_of(std::string_view name) const { return path_ + "/" + std::string(name); }

  Result<File> open_for_read(const std::string& name, IoMode mode = IoMode::buffered) const {
    return open_beneath(fd_, path_, name, mode);
  }
  /// Creates a file in the directory; see File::create().
  Result<File> create(const std::string& name, IoMode mode) const;
  /// Opens a file in the directory for writing; creates it if it does not exist. Never follows a
  /// link.
  Result<File> open_or_create(const std::string& name, IoMode mode) const;

  /// Removes a file. A missing file is not an error.
  Result<> remove(const std::string& name) const;
  /// Removes a file if it has this identity. A missing file or one with a different identity is not
  /// an error.
  Result<> remove(const std::string& name, const FileIdentity& identity) const;

  /// Removes an empty directory.
  Result<> remove_directory(const std::string& name) const;
  /// Removes a directory with everything beneath it. Follows no links. Entries that another process
  /// removes meanwhile are not an error.
  Result<> remove_tree(const std::string& name) const;

  /// Renames a file atomically. Fails with EEXIST if `replace` is false and `to` exists. Call
  /// sync() to make the rename durable.
  Result<> rename(const std::string& from, const std::string& to, bool replace = true) const;

  /// Exchanges the names of two entries atomically. Fails with EINVAL or ENOSYS if the file system
  /// does not support it.
  Result<> exchange(const std::string& one, const std::string& other) const;
  /// Creates a hard link `to` to the file `name` in another directory. Fails with EEXIST if `to`
  /// exists. Does not follow a link.
  Result<> link_from(const Directory& other, const std::string& name, const std::string& to) const;
  /// Returns the target of a symbolic link. Fails with EINVAL if `name` is not a link.
  Result<std::string> read_link(const std::string& name) const;
  /// Creates a symbolic link. Fails with EEXIST if `name` exists.
  Result<> make_link(const std::string& target, const std::string& name) const;
  /// Creates a directory.
  Result<> make_directory(const std::string& name) const;
  /// Copies the permissions of another directory to this one.
  Result<> copy_mode(const Directory& other) const;
  /// Opens a directory in this one. Does not follow a link.
  Result<Directory> open_directory(const std::string& name) const;

  /// Fsyncs the directory, so that creations, renames and removals in it survive a power cut.
  Result<> sync() const;

  /// Fsyncs all parent directories, found through "..", up to the root of the file system. If this
  /// process has created some of them, they then survive a power cut. Skips directories that the
  /// process has no permission to read: it cannot have created them.
  Result<> sync_ancestors() const;

  /// Returns the names of all entries except "." and "..", in no particular order.
  Result<std::vector<std::string>> names() const;

  /// Returns the total size of the files in the directory, without subdirectories.
  Result<std::uint64_t> bytes() const;

  Result<FileIdentity> identity() const;
  /// Returns the identity of the entry with this name. Does not follow a link.
  Result<FileIdentity> identity_of(const std::string& name) const;
  /// Returns true if the entry with this name is the other directory, or a link to it.
  Result<bool> leads_to(const std::string& name, const Directory& other) const;
  /// Returns true if there is an entry with this name, even if it is a dangling link.
  Result<bool> contains(const std::string& name) const;
  /// Returns true if path() currently refers to this directory.
  Result<bool> is_at_path() const;
  /// Returns the directory's current path; empty if it is unknown or the directory was removed.
  std::string current_path() const;

  /// True if no other host can change the directory, by the type of its file system. False if the
  /// type is unknown.
  bool is_local() const { return is_local_; }
  /// Makes the client of a network file system look a name up again. Does nothing if the directory
  /// is local.
  void refresh(const std::string& name) const;
  /// Returns the time of the last change of a file, in seconds by the clock of the file system.
  Result<std::int64_t> modified_s(const std::string& name) const;

  // The lock is a flock on the directory itself, which creates no file. On network file systems,
  // this lock excludes only processes of the same host. There, the lock is also a flock on the file
  // kLockName in the directory, which excludes other hosts if the file system shares locks. The
  // exclusive lock creates the file. The shared lock ignores a missing file, so that a load writes
  // nothing.

  /// Tries to take the shared lock without waiting. Returns false if another descriptor holds the
  /// exclusive lock. Returns true without a lock if the file system has no locks or has run out of
  /// them (ENOLCK).
  Result<bool> try_share();
  /// Tries to take the exclusive lock without waiting; releases this descriptor's shared lock.
  /// Returns false if another descriptor holds a lock, or if the file system has no locks or has
  /// run out of them.
  Result<bool> try_lock_exclusive();
  /// Closes the file kLockName and removes it, so that the directory can be removed: some clients
  /// of network file systems keep a removed file under another name while it is open. The lock then
  /// excludes only processes of this host.
  Result<> remove_lock_file();
  /// Returns false if an attempt to lock has found that the file system has no locks.
  bool has_locks() const { return has_locks_; }

 private:
  Directory(int fd, std::string path, bool is_local);
  Result<bool> lock(int kind);
  Result<bool> try_flock(int fd, int kind);
  Result<bool> lock_file(int kind);
  /// Returns true if the entry with this name is the open file.
  Result<bool> is_entry(int fd, const std::string& name) const;
  void unlock();
  void close_lock_file();

  int fd_ = -1;
  bool is_local_;
  int lock_fd_ = -1;          // kLockName; -1: not open
  bool is_writable_ = false;  // lock_fd_ can write, which NFS requires for the exclusive lock
  pid_t locked_by_ = 0;       // process that took the lock
  bool has_locks_ = true;
  std::string path_;
};

}  // namespace torch_ckpt::os
