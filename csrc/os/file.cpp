#include "os/file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "checked_math.h"
#include "os/fault.h"
#include "os/uninterrupted.h"

namespace torch_ckpt::os {
namespace {

// Linux transfers at most 0x7ffff000 bytes per call. A smaller power of two keeps the data after a
// full transfer aligned.
constexpr std::size_t kMaxTransfer = std::size_t{1} << 30;

constexpr mode_t kFileMode = 0666;

/// Returns the number of pages of a range that are in the page cache, by cachestat(2), which maps
/// no memory. Returns nullopt if the number is unknown: before Linux 6.5, without permission, and
/// on overlay file systems, for which cachestat(2) reports 0.
std::optional<std::uint64_t> cached_pages(int fd, std::uint64_t begin, std::uint64_t bytes) {
  // glibc 2.36 declares neither the number, which is the same for all architectures, nor the types.
  constexpr long kCachestat = 451;
  struct Range {
    std::uint64_t begin, bytes;
  } range{begin, bytes};
  struct Pages {
    std::uint64_t cached, dirty, in_writeback, evicted, recently_evicted;
  } pages{};
  struct statfs system {};
  if (::fstatfs(fd, &system) != 0 || system.f_type == OVERLAYFS_SUPER_MAGIC) return std::nullopt;
  if (::syscall(kCachestat, fd, &range, &pages, 0) != 0) return std::nullopt;
  return pages.cached;
}

}  // namespace

Result<FileIdentity> identity_at(int directory, const char* name, int flags,
                                 const std::string& path) {
  struct statx status {};
  if (::statx(directory, name, flags, STATX_INO | STATX_BTIME, &status) != 0) {
    return system_error(errno, "statx", path);
  }
  FileIdentity identity;
  identity.device = (std::uint64_t{status.stx_dev_major} << 32) | status.stx_dev_minor;
  identity.number = status.stx_ino;
  if ((status.stx_mask & STATX_BTIME) != 0) {
    identity.born_s = status.stx_btime.tv_sec;
    identity.born_ns = status.stx_btime.tv_nsec;
  }
  return identity;
}

File::File(File&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      path_(std::move(other.path_)),
      opened_direct_(other.opened_direct_),
      direct_(other.direct_.load()) {}

File& File::operator=(File&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = std::exchange(other.fd_, -1);
    path_ = std::move(other.path_);
    opened_direct_ = other.opened_direct_;
    direct_ = other.direct_.load();
  }
  return *this;
}

File::~File() {
  if (fd_ >= 0) ::close(fd_);
}

int create_and_open(int directory, const char* name, int flags, mode_t mode) {
  const auto open_with = [&](int more) {
    return uninterrupted([&] { return ::openat(directory, name, flags | more, mode); });
  };
  const int fd = open_with(O_CREAT);
  // MooseFS also reports this without O_EXCL if another host creates the file at the same time.
  const bool has_raced = fd < 0 && errno == EEXIST && (flags & O_EXCL) == 0;
  return has_raced ? open_with(0) : fd;
}

Result<File> File::create(const std::string& path, IoMode mode) {
  return create_at(AT_FDCWD, path, path, mode);
}

Result<File> File::create_at(int directory, const std::string& name, const std::string& path,
                             IoMode mode) {
  return open_for_write(directory, name, path, mode, true);
}

Result<File> File::open_or_create_at(int directory, const std::string& name,
                                     const std::string& path, IoMode mode) {
  auto file = open_for_write(directory, name, path, mode, false);
  if (!file) return file.error();
  const bool is_direct = file->is_direct();
  return adopt(std::move(*file).release(), path, is_direct);
}

Result<File> File::open_for_write(int directory, const std::string& name, const std::string& path,
                                  IoMode mode, bool must_create) {
  TC_FAULT("open", path);
  const int flags = O_WRONLY | (must_create ? O_EXCL : O_NONBLOCK) | O_NOFOLLOW | O_CLOEXEC;
  const auto open_with = [&](int more) {
    return create_and_open(directory, name.c_str(), flags | more, kFileMode);
  };
  // Allocate memory before the file exists, so that running out of memory leaves no file.
  File file(-1, path, mode == IoMode::direct);
  if (mode == IoMode::direct) {
    file.fd_ = open_with(O_DIRECT);
    if (file.fd_ >= 0) return file;
    if (errno != EINVAL) return system_error(errno, "open", path);
    // Some kernels create the file before they refuse O_DIRECT.
    if (must_create) ::unlinkat(directory, name.c_str(), 0);
    file.opened_direct_ = file.direct_ = false;
  }
  file.fd_ = open_with(0);
  if (file.fd_ < 0) return system_error(errno, "open", path);
  return file;
}

Result<File> File::adopt(int fd, std::string path, bool direct) {
  File file(fd, std::move(path), direct);
  struct stat status {};
  if (::fstat(fd, &status) != 0) return system_error(errno, "fstat", file.path());
  if (!S_ISREG(status.st_mode)) {
    Error error = system_error(0, "open", file.path());
    error.code = Errc::invalid_argument;
    error.detail = "not a regular file";
    return error;
  }
  return file;
}

Result<std::uint64_t> File::size() const {
  TC_FAULT("fstat", path_);
  struct stat status {};
  if (::fstat(fd_, &status) != 0) return system_error(errno, "fstat", path_);
  return static_cast<std::uint64_t>(status.st_size);
}

Result<FileIdentity> File::identity() const {
  TC_FAULT("statx", path_);
  return identity_at(fd_, "", AT_EMPTY_PATH, path_);
}

Result<bool> File::try_lock() {
  if (uninterrupted([&] { return ::flock(fd_, LOCK_EX | LOCK_NB); }) == 0) return true;
  return errno == EWOULDBLOCK ? Result<bool>(false) : system_error(errno, "flock", path_);
}

void File::unlock() { ::flock(fd_, LOCK_UN); }

void File::leave_direct_mode() {
  const int flags = ::fcntl(fd_, F_GETFL);
  if (flags >= 0) ::fcntl(fd_, F_SETFL, flags & ~O_DIRECT);
  direct_ = false;
}

Result<> File::write_at(std::span<const std::byte> data, std::uint64_t offset) {
  TC_FAULT("pwrite", path_, offset);
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(data.data()) % kDirectAlignment == 0 &&
                          data.size() % kDirectAlignment == 0 && offset % kDirectAlignment == 0;
  if (direct_ && !is_aligned) leave_direct_mode();
  bool retried_buffered = false;
  while (!data.empty()) {
    const std::size_t ask = std::min(data.size(), kMaxTransfer);
    const ssize_t wrote = ::pwrite(fd_, data.data(), ask, static_cast<off_t>(offset));
    if (wrote < 0) {
      if (errno == EINTR) continue;
      // Another thread may have left direct mode since this write began.
      if (errno == EINVAL && opened_direct_ && !retried_buffered) {
        leave_direct_mode();
        retried_buffered = true;
        continue;
      }
      return system_error(errno, "pwrite", path_, offset);
    }
    // POSIX allows pwrite to return 0 on a full device; without this check, the loop would not end.
    if (wrote == 0) return system_error(ENOSPC, "pwrite", path_, offset);
    const auto count = static_cast<std::size_t>(wrote);
    // The remainder of a short direct write is no longer aligned.
    if (count < ask && direct_ && count % kDirectAlignment != 0) leave_direct_mode();
    data = data.subspan(count);
    offset += count;
  }
  return {};
}

Result<std::size_t> File::read_some_at(std::span<std::byte> out, std::uint64_t offset) const {
  TC_FAULT("pread", path_, offset);
  std::size_t total = 0;
  while (total < out.size()) {
    const std::size_t ask = std::min(out.size() - total, kMaxTransfer);
    const ssize_t got = ::pread(fd_, out.data() + total, ask, static_cast<off_t>(offset + total));
    if (got < 0) {
      if (errno == EINTR) continue;
      return system_error(errno, "pread", path_, offset + total);
    }
    if (got == 0) break;
    total += static_cast<std::size_t>(got);
    // A direct read that stops within a block has reached the end of the file.
    if (direct_ && total % kDirectAlignment != 0) break;
  }
  return total;
}

Result<> File::read_at(std::span<std::byte> out, std::uint64_t offset) const {
  auto got = read_some_at(out, offset);
  if (!got) return got.error();
  if (*got < out.size()) {
    Error error = format_error(Errc::range_past_end,
                               "the file is too short: " + std::to_string(out.size() - *got) +
                                   " bytes of the range given in the metadata are missing",
                               offset + *got);
    error.operation = "pread";
    error.path = path_;
    return error;
  }
  return {};
}

double File::cached_fraction(std::uint64_t offset, std::size_t length) const {
  if (length == 0) return 1.0;
  const auto page_bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const std::uint64_t begin = align_down(offset, page_bytes);
  const std::size_t span = align_up(offset - begin + length, page_bytes);
  const std::size_t pages = span / page_bytes;
  if (const auto cached = cached_pages(fd_, begin, span)) {
    return static_cast<double>(*cached) / static_cast<double>(pages);
  }
  // preadv2(RWF_NOWAIT) would start read-ahead of pages that are not cached.
  void* mapped = ::mmap(nullptr, span, PROT_READ, MAP_SHARED, fd_, static_cast<off_t>(begin));
  if (mapped == MAP_FAILED) return 1.0;
  std::vector<unsigned char> resident(pages);
  const bool is_known = ::mincore(mapped, span, resident.data()) == 0;
  ::munmap(mapped, span);
  if (!is_known) return 1.0;
  const auto cached = std::count_if(resident.begin(), resident.end(),
                                    [](unsigned char page) { return (page & 1) != 0; });
  return static_cast<double>(cached) / static_cast<double>(resident.size());
}

Result<> File::reserve(std::uint64_t bytes) {
  TC_FAULT("fallocate", path_);
  if (bytes == 0) return {};
  while (::fallocate(fd_, 0, 0, static_cast<off_t>(bytes)) != 0) {
    if (errno == EINTR) continue;
    if (errno == EOPNOTSUPP || errno == ENOSYS) return {};
    return system_error(errno, "fallocate", path_);
  }
  return {};
}

Result<> File::truncate(std::uint64_t bytes) {
  TC_FAULT("ftruncate", path_, bytes);
  while (::ftruncate(fd_, static_cast<off_t>(bytes)) != 0) {
    if (errno != EINTR) return system_error(errno, "ftruncate", path_, bytes);
  }
  return {};
}

Result<> File::punch_hole(std::uint64_t offset, std::uint64_t length) {
  TC_FAULT("fallocate", path_, offset);
  constexpr int kMode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
  const int done = uninterrupted([&] {
    return ::fallocate(fd_, kMode, static_cast<off_t>(offset), static_cast<off_t>(length));
  });
  if (done != 0) return system_error(errno, "fallocate", path_, offset);
  return {};
}

void File::start_writeback(std::uint64_t offset, std::uint64_t length) const {
  ::sync_file_range(fd_, static_cast<off_t>(offset), static_cast<off_t>(length),
                    SYNC_FILE_RANGE_WRITE);
}

Result<> File::sync() {
  TC_FAULT("fsync", path_);
  // Never retry, not even after EINTR; see the header.
  if (::fsync(fd_) != 0) return system_error(errno, "fsync", path_);
  return {};
}

Result<> File::close() && {
  const int fd = std::exchange(fd_, -1);
  // Linux releases the descriptor even if close fails, so never close it again.
  const int failed = ::close(fd) != 0 ? errno : 0;
  TC_FAULT("close", path_);
  if (failed != 0 && failed != EINTR) return system_error(failed, "close", path_);
  return {};
}

}  // namespace torch_ckpt::os
