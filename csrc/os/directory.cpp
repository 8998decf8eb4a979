#include "os/directory.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <utility>

#include "os/fault.h"
#include "os/uninterrupted.h"

namespace torch_ckpt::os {
namespace {

// Types of local file systems, as statfs(2) reports them. ext2, ext3 and ext4 have the same type.
// The list does not have FUSE, because most FUSE file systems are on a network.
constexpr std::array<std::uint32_t, 18> kLocalTypes{
    0xca451a4e,  // bcachefs
    0x9123683e,  // btrfs
    0x2011bab0,  // exfat
    0x0000ef53,  // ext4
    0xf2f52010,  // f2fs
    0x3153464a,  // jfs
    0x00004d44,  // msdos, vfat
    0x00003434,  // nilfs2
    0x7366746e,  // ntfs3
    0x794c7630,  // overlay
    0x858458f6,  // ramfs
    0x52654973,  // reiserfs
    0x73717368,  // squashfs
    0x01021994,  // tmpfs
    0x00011954,  // ufs
    0x58465342,  // xfs
    0x2fc12fc1,  // zfs
    0xe0f5e1e2,  // erofs
};

std::string parent_of(const std::string& path) {
  const auto slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

bool is_directory(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

bool is_permission_error(int failed) { return failed == EACCES || failed == EPERM; }

int open_at(int directory, const char* path, int access) {
  return uninterrupted([&] { return ::openat(directory, path, access | O_DIRECTORY | O_CLOEXEC); });
}

bool is_on_local_file_system(int fd) {
  struct statfs found {};
  if (uninterrupted([&] { return ::fstatfs(fd, &found); }) != 0) return false;
  return std::ranges::find(kLocalTypes, static_cast<std::uint32_t>(found.f_type)) !=
         kLocalTypes.end();
}

// The kernel asks the server for an entry before it creates a link of that name. The link is never
// created, because its target is on another file system: the call fails with EEXIST or EXDEV.
void look_up_again(int directory, const char* path) {
  static_cast<void>(::linkat(AT_FDCWD, "/proc/self/stat", directory, path, 0));
}

/// Returns the path by which the kernel knows a descriptor; empty if it is unknown.
std::string path_of_descriptor(int fd) {
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  std::string path(PATH_MAX, 0);
  const ssize_t length = ::readlink(link.c_str(), path.data(), path.size());
  path.resize(static_cast<std::size_t>(std::max<ssize_t>(length, 0)));
  return path;
}

// Owns the descriptor of a directory; -1: none.
struct Descriptor {
  explicit Descriptor(int given = -1) : fd(given) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
  int fd;
};

Result<> sync_by(int fd, const std::string& path) {
  TC_FAULT("fsync_directory", path);
  // EINVAL: some network file systems cannot fsync directories, but create files synchronously.
  if (::fsync(fd) != 0 && errno != EINVAL) return system_error(errno, "fsync", path);
  return {};
}

}  // namespace

Result<> make_directories(const std::string& given) {
  std::string path = given;
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  if (path.empty() || is_directory(path)) return {};
  const std::string parent = parent_of(path);
  if (parent != path) {
    TC_TRY(make_directories(parent));
  }
  TC_FAULT("mkdir", path);
  if (::mkdir(path.c_str(), 0777) != 0) {
    // Another rank may have created the directory meanwhile.
    if (errno == EEXIST && is_directory(path)) return {};
    return system_error(errno, "mkdir", path);
  }
  return {};
}

Result<Directory> Directory::open(const std::string& path) {
  TC_FAULT("open_directory", path);
  Descriptor found(open_at(AT_FDCWD, path.c_str(), O_RDONLY));
  if (found.fd < 0 && errno != ENOENT) return system_error(errno, "open", path);
  if (found.fd >= 0 && is_on_local_file_system(found.fd)) {
    return Directory(std::exchange(found.fd, -1), path, true);
  }
  look_up_again(AT_FDCWD, path.c_str());
  Descriptor fresh(open_at(AT_FDCWD, path.c_str(), O_RDONLY));
  if (fresh.fd < 0) return system_error(errno, "open", path);
  const std::string real_path = path_of_descriptor(fresh.fd);
  if (real_path != path) {
    // The path is a link, for example, so look up the directory that it leads to, too.
    look_up_again(AT_FDCWD, real_path.c_str());
    const int fd = open_at(AT_FDCWD, path.c_str(), O_RDONLY);
    if (fd < 0) return system_error(errno, "open", path);
    ::close(std::exchange(fresh.fd, fd));
  }
  const bool is_local = is_on_local_file_system(fresh.fd);
  return Directory(std::exchange(fresh.fd, -1), path, is_local);
}

Result<Directory> Directory::duplicate() const {
  TC_FAULT("fcntl", path_);
  const int fd = ::fcntl(fd_, F_DUPFD_CLOEXEC, 0);
  if (fd < 0) return system_error(errno, "fcntl", path_);
  return Directory(fd, path_, is_local_);
}

Result<Directory> Directory::reopen() const {
  TC_FAULT("open_directory", path_);
  const int fd = open_at(fd_, ".", O_RDONLY);
  if (fd < 0) return system_error(errno, "open", path_);
  return Directory(fd, path_, is_local_);
}

Directory::Directory(int fd, std::string path, bool is_local)
    : fd_(fd), is_local_(is_local), path_(std::move(path)) {}

Directory::Directory(Directory&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      is_local_(other.is_local_),
      lock_fd_(std::exchange(other.lock_fd_, -1)),
      is_writable_(other.is_writable_),
      locked_by_(std::exchange(other.locked_by_, 0)),
      has_locks_(other.has_locks_),
      path_(std::move(other.path_)) {}

Directory& Directory::operator=(Directory&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = std::exchange(other.fd_, -1);
    is_local_ = other.is_local_;
    lock_fd_ = std::exchange(other.lock_fd_, -1);
    is_writable_ = other.is_writable_;
    locked_by_ = std::exchange(other.locked_by_, 0);
    has_locks_ = other.has_locks_;
    path_ = std::move(other.path_);
  }
  return *this;
}

Directory::~Directory() { close(); }

// Nothing is written through this descriptor, so errors from close() can be ignored.
void Directory::close() {
  if (fd_ < 0) return;
  unlock();
  close_lock_file();
  ::close(std::exchange(fd_, -1));
}

// Unlock explicitly: a forked child shares the lock, so closing the descriptor would not release
// it. The child itself must not release the lock.
void Directory::unlock() {
  if (std::exchange(locked_by_, 0) != ::getpid()) return;
  if (lock_fd_ >= 0) ::flock(lock_fd_, LOCK_UN);
  ::flock(fd_, LOCK_UN);
}

void Directory::close_lock_file() {
  if (lock_fd_ >= 0) ::close(std::exchange(lock_fd_, -1));
}

void Directory::refresh(const std::string& name) const {
  if (!is_local_) look_up_again(fd_, name.c_str());
}

Result<File> Directory::create(const std::string& name, IoMode mode) const {
  return File::create_at(fd_, name, path_of(name), mode);
}

Result<File> Directory::open_or_create(const std::string& name, IoMode mode) const {
  return File::open_or_create_at(fd_, name, path_of(name), mode);
}

Result<> Directory::remove(const std::string& name) const {
  const std::string path = path_of(name);
  TC_FAULT("unlink", path);
  if (::unlinkat(fd_, name.c_str(), 0) != 0 && errno != ENOENT) {
    return system_error(errno, "unlink", path);
  }
  return {};
}

Result<> Directory::remove(const std::string& name, const FileIdentity& identity) const {
  auto found = identity_of(name);
  if (!found) return found.error().sys_errno == ENOENT ? Result<>() : found.error();
  if (*found != identity) return {};
  return remove(name);
}

Result<> Directory::remove_directory(const std::string& name) const {
  const std::string path = path_of(name);
  TC_FAULT("rmdir", path);
  if (::unlinkat(fd_, name.c_str(), AT_REMOVEDIR) != 0) return system_error(errno, "rmdir", path);
  return {};
}

Result<> Directory::remove_tree(const std::string& name) const {
  const std::string path = path_of(name);
  TC_FAULT("rmtree", path);
  refresh(name);
  const int fd = open_at(fd_, name.c_str(), O_RDONLY | O_NOFOLLOW);
  if (fd < 0) return errno == ENOENT ? Result<>() : system_error(errno, "open", path);
  const Directory tree(fd, path, is_local_);
  auto entries = tree.names();
  if (!entries) return entries.error();
  for (const std::string& entry : *entries) {
    auto removed = tree.remove(entry);
    if (!removed && removed.error().sys_errno == EISDIR) removed = tree.remove_tree(entry);
    if (!removed) return removed;
  }
  auto removed = remove_directory(name);
  return !removed && removed.error().sys_errno == ENOENT ? Result<>() : removed;
}

Result<> Directory::rename(const std::string& from, const std::string& to, bool replace) const {
  const std::string path = path_of(to);
  TC_FAULT("rename", path);
  if (!replace) {
    if (::renameat2(fd_, from.c_str(), fd_, to.c_str(), RENAME_NOREPLACE) == 0) return {};
    if (errno != EINVAL && errno != ENOSYS) return system_error(errno, "rename", path);
    // The file system does not support RENAME_NOREPLACE. Another process may still create `to`
    // between this check and the rename.
    struct stat status {};
    if (::fstatat(fd_, to.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0) {
      return system_error(EEXIST, "rename", path);
    }
  }
  if (::renameat(fd_, from.c_str(), fd_, to.c_str()) != 0) {
    return system_error(errno, "rename", path);
  }
  return {};
}

Result<> Directory::exchange(const std::string& one, const std::string& other) const {
  const std::string path = path_of(other);
  TC_FAULT("rename", path);
  if (::renameat2(fd_, one.c_str(), fd_, other.c_str(), RENAME_EXCHANGE) != 0) {
    return system_error(errno, "rename", path);
  }
  return {};
}

Result<> Directory::link_from(const Directory& other, const std::string& name,
                              const std::string& to) const {
  const std::string path = path_of(to);
  TC_FAULT("link", path);
  if (::linkat(other.fd_, name.c_str(), fd_, to.c_str(), 0) != 0) {
    return system_error(errno, "link", path);
  }
  return {};
}

Result<std::string> Directory::read_link(const std::string& name) const {
  const std::string path = path_of(name);
  TC_FAULT("readlink", path);
  refresh(name);
  std::string target(PATH_MAX, 0);
  const ssize_t length = ::readlinkat(fd_, name.c_str(), target.data(), target.size());
  if (length < 0) return system_error(errno, "readlink", path);
  target.resize(static_cast<std::size_t>(length));
  return target;
}

Result<> Directory::make_link(const std::string& target, const std::string& name) const {
  const std::string path = path_of(name);
  TC_FAULT("symlink", path);
  if (::symlinkat(target.c_str(), fd_, name.c_str()) != 0) {
    return system_error(errno, "symlink", path);
  }
  return {};
}

Result<> Directory::make_directory(const std::string& name) const {
  const std::string path = path_of(name);
  TC_FAULT("mkdir", path);
  if (::mkdirat(fd_, name.c_str(), 0777) != 0) {
    return system_error(errno, "mkdir", path);
  }
  return {};
}

Result<> Directory::copy_mode(const Directory& other) const {
  TC_FAULT("fchmod", path_);
  struct stat status {};
  if (::fstat(other.fd_, &status) != 0) return system_error(errno, "stat", other.path_);
  constexpr mode_t kModeBits = 07777;
  if (::fchmod(fd_, status.st_mode & kModeBits) != 0) return system_error(errno, "fchmod", path_);
  return {};
}

Result<Directory> Directory::open_directory(const std::string& name) const {
  const std::string path = path_of(name);
  TC_FAULT("open", path);
  refresh(name);
  const int fd = open_at(fd_, name.c_str(), O_RDONLY | O_NOFOLLOW);
  if (fd < 0) return system_error(errno, "open", path);
  return Directory(fd, path, is_on_local_file_system(fd));
}

Result<> Directory::sync() const { return sync_by(fd_, path_); }

Result<> Directory::sync_ancestors() const {
  struct stat below {};
  if (::fstat(fd_, &below) != 0) return system_error(errno, "stat", path_);
  // Opening ".." needs only search permission. fsync also needs read permission.
  Descriptor at;
  for (std::string path = path_ + "/..";; path += "/..") {
    Descriptor above(open_at(at.fd >= 0 ? at.fd : fd_, "..", O_PATH));
    if (above.fd < 0)
      return is_permission_error(errno) ? Result<>() : system_error(errno, "open", path);
    struct stat status {};
    if (::fstat(above.fd, &status) != 0) return system_error(errno, "stat", path);
    const bool is_root = status.st_dev != below.st_dev || status.st_ino == below.st_ino;
    if (is_root) return {};
    const Descriptor readable(open_at(above.fd, ".", O_RDONLY));
    if (readable.fd >= 0) {
      auto synced = sync_by(readable.fd, path);
      if (!synced && !is_permission_error(synced.error().sys_errno)) return synced;
    } else if (!is_permission_error(errno)) {
      return system_error(errno, "open", path);
    }
    std::swap(at.fd, above.fd);
    below = status;
  }
}

Result<std::vector<std::string>> Directory::names() const {
  TC_FAULT("readdir", path_);
  // Use a separate open file description, whose position no other call changes.
  const int fd = open_at(fd_, ".", O_RDONLY);
  if (fd < 0) return system_error(errno, "open", path_);
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(::fdopendir(fd), ::closedir);
  if (stream == nullptr) {
    const int failed = errno;
    ::close(fd);
    return system_error(failed, "opendir", path_);
  }
  std::vector<std::string> names;
  while (true) {
    errno = 0;
    const struct dirent* entry = ::readdir(stream.get());
    if (entry == nullptr && errno != 0) return system_error(errno, "readdir", path_);
    if (entry == nullptr) return names;
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
}

Result<FileIdentity> Directory::identity() const {
  TC_FAULT("statx", path_);
  return identity_at(fd_, "", AT_EMPTY_PATH, path_);
}

Result<FileIdentity> Directory::identity_of(const std::string& name) const {
  const std::string path = path_of(name);
  TC_FAULT("statx", path);
  refresh(name);
  return identity_at(fd_, name.c_str(), AT_SYMLINK_NOFOLLOW, path);
}

Result<bool> Directory::leads_to(const std::string& name, const Directory& other) const {
  const auto identity = other.identity();
  if (!identity) {
    // Another host has removed the directory.
    const int failed = identity.error().sys_errno;
    return failed == ENOENT || failed == ESTALE ? Result<bool>(false) : identity.error();
  }
  refresh(name);
  auto found = identity_at(fd_, name.c_str(), 0, path_of(name));
  if (found) return *found == *identity;
  return found.error().sys_errno == ENOENT ? Result<bool>(false) : found.error();
}

Result<bool> Directory::contains(const std::string& name) const {
  auto found = identity_of(name);
  if (found) return true;
  return found.error().sys_errno == ENOENT ? Result<bool>(false) : found.error();
}

Result<std::uint64_t> Directory::bytes() const {
  auto found = names();
  if (!found) return found.error();
  std::uint64_t total = 0;
  for (const std::string& name : *found) {
    struct stat status {};
    if (::fstatat(fd_, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0) {
      total += static_cast<std::uint64_t>(status.st_size);
    } else if (errno != ENOENT) {  // another process may remove files meanwhile
      return system_error(errno, "stat", path_of(name));
    }
  }
  return total;
}

Result<bool> Directory::is_at_path() const {
  auto own = identity();
  if (!own) return own.error();
  if (!is_local_) look_up_again(AT_FDCWD, path_.c_str());
  auto found = identity_at(AT_FDCWD, path_.c_str(), 0, path_);
  if (found) return *found == *own;
  const int failed = found.error().sys_errno;
  // ENOTDIR and ELOOP: a component of the path may have been replaced.
  if (failed == ENOENT || failed == ENOTDIR || failed == ELOOP) return false;
  return found.error();
}

std::string Directory::current_path() const {
  struct stat status {};
  if (::fstat(fd_, &status) != 0 || status.st_nlink == 0) return {};
  return path_of_descriptor(fd_);
}

Result<std::int64_t> Directory::modified_s(const std::string& name) const {
  struct stat status {};
  if (::fstatat(fd_, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) {
    return system_error(errno, "stat", path_of(name));
  }
  return std::int64_t{status.st_mtim.tv_sec};
}

Result<bool> Directory::try_share() { return lock(LOCK_SH); }

Result<bool> Directory::try_lock_exclusive() { return lock(LOCK_EX); }

Result<> Directory::remove_lock_file() {
  close_lock_file();
  return remove(std::string(kLockName));
}

Result<bool> Directory::lock(int kind) {
  TC_FAULT("flock", path_);
  if (fd_ < 0) return system_error(EBADF, "flock", path_);
  auto locked = try_flock(fd_, kind);
  if (locked && *locked && has_locks_) {
    locked_by_ = ::getpid();
    if (!is_local()) locked = lock_file(kind);
  }
  if (!locked || !*locked) unlock();
  return locked;
}

Result<bool> Directory::lock_file(int kind) {
  const bool is_exclusive = kind == LOCK_EX;
  if (is_exclusive && !is_writable_) close_lock_file();
  if (lock_fd_ < 0) {
    constexpr int kFlags = O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
    constexpr mode_t kMode = 0666;
    const std::string name(kLockName);
    lock_fd_ = is_exclusive
                   ? create_and_open(fd_, name.c_str(), O_RDWR | kFlags, kMode)
                   : uninterrupted([&] { return ::openat(fd_, name.c_str(), O_RDONLY | kFlags); });
    is_writable_ = is_exclusive;
  }
  if (lock_fd_ < 0) {
    // Another process has removed the directory, or no save of this version has used it.
    if (!is_exclusive || errno == ENOENT) return true;
    return system_error(errno, "open", path_of(kLockName));
  }
  auto locked = try_flock(lock_fd_, kind);
  if (locked && *locked) locked = is_entry(lock_fd_, std::string(kLockName));
  // The next attempt opens the file again, because another process may have removed or replaced it.
  if (!locked || !*locked) close_lock_file();
  return locked;
}

Result<bool> Directory::is_entry(int fd, const std::string& name) const {
  const auto own = identity_at(fd, "", AT_EMPTY_PATH, path_of(name));
  const auto found = identity_of(name);
  for (const auto* identity : {&own, &found}) {
    if (*identity) continue;
    const int failed = identity->error().sys_errno;
    return failed == ENOENT || failed == ESTALE ? Result<bool>(false) : identity->error();
  }
  return *own == *found;
}

Result<bool> Directory::try_flock(int fd, int kind) {
  if (uninterrupted([&] { return ::flock(fd, kind | LOCK_NB); }) == 0) return true;
  switch (errno) {
    case EWOULDBLOCK:
      return false;
    case ENOSYS:
    case EOPNOTSUPP:
    case EINVAL:
      has_locks_ = false;
      // Refuse the exclusive lock: its holder would remove files of processes that work without a
      // lock.
      return kind == LOCK_SH;
    case ENOLCK:
      return kind == LOCK_SH;
    default:
      return system_error(errno, "flock", path_);
  }
}

}  // namespace torch_ckpt::os
