#include "os/directory.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "os/fault.h"
#include "os/uninterrupted.h"

namespace torch_ckpt::os {
namespace {

std::string parent_of(const std::string& path) {
  const auto slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

bool is_directory(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

bool may_not(int failed) { return failed == EACCES || failed == EPERM; }

}  // namespace

Result<> make_directories(const std::string& given) {
  std::string path = given;
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  if (path.empty() || is_directory(path)) return {};
  const std::string parent = parent_of(path);
  if (parent != path) {
    if (auto made = make_directories(parent); !made) return made;
  }
  TC_FAULT("mkdir", path);
  if (::mkdir(path.c_str(), 0777) != 0) {
    // Another rank may have made it meanwhile.
    if (errno == EEXIST && is_directory(path)) return {};
    return system_error(errno, "mkdir", path);
  }
  return {};
}

Result<> sync_directory(const std::string& path) {
  TC_FAULT("fsync_directory", path);
  const int fd =
      uninterrupted([&] { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
  if (fd < 0) return system_error(errno, "open", path);
  const int failed = ::fsync(fd) != 0 ? errno : 0;
  ::close(fd);
  // Some network file systems have no fsync of directories; their creations are synchronous.
  if (failed != 0 && failed != EINVAL) return system_error(failed, "fsync", path);
  return {};
}

Result<> sync_ancestors(const std::string& path) {
  struct stat below {};
  if (::stat(path.c_str(), &below) != 0) return system_error(errno, "stat", path);
  for (std::string above = path + "/..";; above += "/..") {
    struct stat status {};
    if (::stat(above.c_str(), &status) != 0) {
      return may_not(errno) ? Result<>() : system_error(errno, "stat", above);
    }
    const bool is_root = status.st_dev != below.st_dev || status.st_ino == below.st_ino;
    if (is_root) return {};
    if (auto synced = sync_directory(above); !synced && !may_not(synced.error().sys_errno)) {
      return synced;
    }
    below = status;
  }
}

Result<> rename_file(const std::string& from, const std::string& to, bool replace) {
  TC_FAULT("rename", to);
  if (!replace) {
    if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) return {};
    if (errno != EINVAL && errno != ENOSYS) return system_error(errno, "rename", to);
    // A file system without it: somebody may make `to` between the look and the rename.
    struct stat status {};
    if (::lstat(to.c_str(), &status) == 0) return system_error(EEXIST, "rename", to);
  }
  if (::rename(from.c_str(), to.c_str()) != 0) return system_error(errno, "rename", to);
  return {};
}

Result<> remove_file(const std::string& path) {
  TC_FAULT("unlink", path);
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) return system_error(errno, "unlink", path);
  return {};
}

}  // namespace torch_ckpt::os
