#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "error.h"

namespace torch_ckpt::os {

enum class IoMode { buffered, direct };

/// Which file it is, beyond its name: another one that has the name by now differs in it, also
/// where it was given the number of one that is gone.
struct FileIdentity {
  std::uint64_t device = 0;
  std::uint64_t number = 0;
  std::int64_t born_s = 0;  // 0 where the file system does not keep it
  std::uint32_t born_ns = 0;

  bool operator==(const FileIdentity&) const = default;
};

// One open regular file with its path, for error messages. Owns the descriptor.
// Positioned calls may run concurrently on one File; close() and moves may not.
// The destructor closes silently and is for the error path; the success path calls close().
class File {
 public:
  /// Creates `path`, which must not exist; never follows a link. Mode 0666 & ~umask.
  /// With IoMode::direct on a file system without direct I/O the file is opened buffered.
  static Result<File> create(const std::string& path, IoMode mode);
  /// The same, of a name in the directory that is open as `directory`; `path` is for messages.
  static Result<File> create_at(int directory, const std::string& name, const std::string& path,
                                IoMode mode);
  /// Takes a descriptor over that was opened for reading (os/beneath.h). One of anything but a
  /// regular file (FIFO, device, directory) is closed and refused.
  static Result<File> adopt(int fd, std::string path, bool direct);

  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File();

  const std::string& path() const { return path_; }
  bool is_direct() const { return direct_; }

  /// Bytes in the file, from fstat.
  Result<std::uint64_t> size() const;
  Result<FileIdentity> identity() const;

  /// Writes all of `data` at `offset`; short writes and EINTR are continued. In direct mode the
  /// address, size and offset must be multiples of kDirectAlignment; where the kernel refuses
  /// direct writes after all, or stops in the middle of a block, the rest is written buffered.
  Result<> write_at(std::span<const std::byte> data, std::uint64_t offset);

  /// Reads exactly `out.size()` bytes at `offset`. Errc::range_past_end when the file is shorter.
  Result<> read_at(std::span<std::byte> out, std::uint64_t offset) const;

  /// Reads up to `out.size()` bytes; fewer only at the end of the file.
  Result<std::size_t> read_some_at(std::span<std::byte> out, std::uint64_t offset) const;

  /// How much of [offset, offset + length) the page cache holds, from 0 to 1; 1 where the kernel
  /// does not say (it tells only who may write the file). Reads nothing and starts no read-ahead.
  double cached_fraction(std::uint64_t offset, std::size_t length) const;

  /// Reserves `bytes` on disk so that a full disk is found before the data moves. File systems
  /// without the operation are not an error.
  Result<> reserve(std::uint64_t bytes);
  Result<> truncate(std::uint64_t bytes);

  /// Asks the kernel to start writing [offset, offset + length) back; a hint, so errors are left
  /// for sync() to report.
  void start_writeback(std::uint64_t offset, std::uint64_t length) const;

  /// fsync. After an error the file is dead: the kernel may have dropped the dirty pages and a
  /// second fsync would report success (PostgreSQL's fsyncgate), so never call it again.
  Result<> sync();
  Result<> close() &&;

  /// Gives the descriptor away; the file is closed for this object.
  int release() && { return std::exchange(fd_, -1); }

 private:
  File(int fd, std::string path, bool direct) : fd_(fd), path_(std::move(path)), direct_(direct) {}
  void leave_direct_mode();

  int fd_ = -1;
  std::string path_;
  bool direct_ = false;
};

/// Of what `name` is in the directory that is open as `directory`; flags are those of statx.
Result<FileIdentity> identity_at(int directory, const char* name, int flags,
                                 const std::string& path);

/// What address, length and offset of direct I/O are aligned to. Larger than what most devices ask
/// for (512), so that one constant serves all.
inline constexpr std::size_t kDirectAlignment = 4096;

}  // namespace torch_ckpt::os
