#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "error.h"

namespace torch_ckpt::os {

enum class IoMode { buffered, direct };

/// Identifies a file independently of its name. The creation time distinguishes it from a later
/// file with the same inode number.
struct FileIdentity {
  std::uint64_t device = 0;
  std::uint64_t number = 0;
  std::int64_t born_s = 0;  // creation time; 0 if the file system does not record it
  std::uint32_t born_ns = 0;

  bool operator==(const FileIdentity&) const = default;
};

/// Opens a file, and creates it if it does not exist. Returns -1 after an error, and sets errno.
///
/// @param flags of open(), without O_CREAT.
int create_and_open(int directory, const char* name, int flags, mode_t mode);

// An open regular file, with its path for messages. Owns the descriptor. Reads and writes may run
// concurrently; close() and moves may not. The destructor ignores errors from close, so call
// close() unless an error has already occurred.
class File {
 public:
  /// Creates `path` with mode 0666 & ~umask. Fails if it exists; never follows a link. If the file
  /// system does not support direct I/O, IoMode::direct opens the file buffered.
  static Result<File> create(const std::string& path, IoMode mode);
  /// Creates `name` in the directory with the descriptor `directory`. `path` is used in messages.
  static Result<File> create_at(int directory, const std::string& name, const std::string& path,
                                IoMode mode);
  /// Like create_at(), but opens the file if it exists already.
  static Result<File> open_or_create_at(int directory, const std::string& name,
                                        const std::string& path, IoMode mode);
  /// Takes ownership of an open descriptor. Closes and refuses anything but a regular file (FIFO,
  /// device, directory).
  static Result<File> adopt(int fd, std::string path, bool direct);

  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File();

  const std::string& path() const { return path_; }
  /// True if the file was opened in direct mode, and no write has left it; see write_at().
  bool is_direct() const { return direct_; }

  Result<std::uint64_t> size() const;
  Result<FileIdentity> identity() const;

  /// Writes all of `data` at `offset`; continues after short writes and EINTR. If the address, size
  /// or offset is not a multiple of kDirectAlignment, or the kernel refuses a direct write or stops
  /// in the middle of a block, this and all later writes are buffered.
  Result<> write_at(std::span<const std::byte> data, std::uint64_t offset);

  /// Reads `out.size()` bytes at `offset`. Fails with Errc::range_past_end if the file is too
  /// short.
  Result<> read_at(std::span<std::byte> out, std::uint64_t offset) const;

  /// Reads up to `out.size()` bytes. Returns the number read, which is smaller only at the end of
  /// the file.
  Result<std::size_t> read_some_at(std::span<std::byte> out, std::uint64_t offset) const;

  /// Tries to lock the file exclusively, without waiting. Returns false if another descriptor holds
  /// a lock, and fails if the file system has no locks.
  Result<bool> try_lock();
  /// Releases the lock, also for forked children that share the descriptor.
  void unlock();

  /// Returns the fraction of [offset, offset + length) that is in the page cache, from 0 to 1.
  /// Returns 1 if the kernel does not report it; it requires permission to write the file. Reads
  /// nothing and starts no read-ahead.
  double cached_fraction(std::uint64_t offset, std::size_t length) const;

  /// Reserves `bytes` on disk, so that a full disk is detected before data is written. Does nothing
  /// on file systems that do not support it.
  Result<> reserve(std::uint64_t bytes);
  Result<> truncate(std::uint64_t bytes);
  /// Frees the storage of a range, which then reads as zeros.
  Result<> punch_hole(std::uint64_t offset, std::uint64_t length);

  /// Asks the kernel to start writing a range back to disk. sync() reports any errors.
  void start_writeback(std::uint64_t offset, std::uint64_t length) const;

  /// Fsyncs the file. Must not be called again after an error: the kernel may have dropped the
  /// dirty pages, and a second fsync would report success (PostgreSQL's fsyncgate).
  Result<> sync();
  Result<> close() &&;

  /// Returns the descriptor, which the caller then owns.
  int release() && { return std::exchange(fd_, -1); }

 private:
  File(int fd, std::string path, bool direct)
      : fd_(fd), path_(std::move(path)), opened_direct_(direct), direct_(direct) {}
  void leave_direct_mode();
  static Result<File> open_for_write(int directory, const std::string& name,
                                     const std::string& path, IoMode mode, bool must_create);

  int fd_ = -1;
  std::string path_;
  // Concurrent writes may leave direct mode.
  bool opened_direct_ = false;
  std::atomic<bool> direct_ = false;
};

/// Returns the identity of `name` in the directory with the descriptor `directory`. `flags` are
/// passed to statx; `path` is used in messages.
Result<FileIdentity> identity_at(int directory, const char* name, int flags,
                                 const std::string& path);

/// Alignment of address, length and offset for direct I/O. Most devices need only 512 bytes.
inline constexpr std::size_t kDirectAlignment = 4096;

}  // namespace torch_ckpt::os
