#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "error.h"

namespace torch_ckpt::os {

enum class IoMode { buffered, direct };

/// Identity of a file, independent of its name. The time of creation distinguishes it from a later
/// file with the same inode number.
struct FileIdentity {
  std::uint64_t device = 0;
  std::uint64_t number = 0;
  std::int64_t born_s = 0;  // 0 if the file system does not store it
  std::uint32_t born_ns = 0;

  bool operator==(const FileIdentity&) const = default;
};

// An open regular file, with its path for messages. Owns the descriptor.
// Positioned calls may run concurrently on one File; close() and moves may not.
// The destructor ignores errors of closing and is for the error path; otherwise call close().
class File {
 public:
  /// Creates `path`, which must not exist; never follows a link. Mode 0666 & ~umask.
  /// If the file system has no direct I/O, IoMode::direct opens the file buffered.
  static Result<File> create(const std::string& path, IoMode mode);
  /// Creates `name` in the directory with the descriptor `directory`; `path` is for messages.
  static Result<File> create_at(int directory, const std::string& name, const std::string& path,
                                IoMode mode);
  /// Takes ownership of a descriptor that was opened for reading (os/beneath.h). Closes and refuses
  /// anything but a regular file (FIFO, device, directory).
  static Result<File> adopt(int fd, std::string path, bool direct);

  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File();

  const std::string& path() const { return path_; }
  bool is_direct() const { return direct_; }

  Result<std::uint64_t> size() const;
  Result<FileIdentity> identity() const;

  /// Writes all of `data` at `offset`; continues after short writes and EINTR. In direct mode the
  /// address, size and offset must be multiples of kDirectAlignment. If the kernel refuses a direct
  /// write, or stops in the middle of a block, the remaining data is written buffered.
  Result<> write_at(std::span<const std::byte> data, std::uint64_t offset);

  /// Reads `out.size()` bytes at `offset`; fails with Errc::range_past_end if there are fewer.
  Result<> read_at(std::span<std::byte> out, std::uint64_t offset) const;

  /// Reads up to `out.size()` bytes; fewer only at the end of the file.
  Result<std::size_t> read_some_at(std::span<std::byte> out, std::uint64_t offset) const;

  /// The fraction of [offset, offset + length) that is in the page cache, from 0 to 1. Returns 1 if
  /// the kernel does not report it: it does only if this user may write the file. Reads nothing and
  /// starts no read-ahead.
  double cached_fraction(std::uint64_t offset, std::size_t length) const;

  /// Reserves `bytes` on disk, so that a full disk is found before data is written. Succeeds on
  /// file systems without the operation.
  Result<> reserve(std::uint64_t bytes);
  Result<> truncate(std::uint64_t bytes);

  /// Asks the kernel to start writing back a range. sync() reports errors.
  void start_writeback(std::uint64_t offset, std::uint64_t length) const;

  /// Fsyncs the file. After an error never call it again: the kernel may have dropped the dirty
  /// pages, and a second fsync would report success (PostgreSQL's fsyncgate).
  Result<> sync();
  Result<> close() &&;

  /// Returns the descriptor; the caller then owns it.
  int release() && { return std::exchange(fd_, -1); }

 private:
  File(int fd, std::string path, bool direct) : fd_(fd), path_(std::move(path)), direct_(direct) {}
  void leave_direct_mode();

  int fd_ = -1;
  std::string path_;
  bool direct_ = false;
};

/// Returns the identity of `name` in the directory with the descriptor `directory`. `flags` are
/// flags of statx.
Result<FileIdentity> identity_at(int directory, const char* name, int flags,
                                 const std::string& path);

/// Alignment of address, length and offset for direct I/O. Most devices need 512; this serves all.
inline constexpr std::size_t kDirectAlignment = 4096;

}  // namespace torch_ckpt::os
