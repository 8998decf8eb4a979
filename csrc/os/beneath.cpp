#include "os/beneath.h"

#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>
#include <vector>

#include "file_name.h"
#include "os/fault.h"
#include "os/uninterrupted.h"

namespace torch_ckpt::os {
namespace {

Error outside_error(const std::string& path, std::string detail) {
  Error error = format_error(Errc::outside_directory, std::move(detail));
  error.operation = "open";
  error.path = path;
  return error;
}

Error link_error(const std::string& path) {
  return outside_error(
      path,
      "the path is or contains a symbolic link, and checkpoint files are not read through links; "
      "copy the files themselves into the directory");
}

std::vector<std::string> components_of(std::string_view name) {
  std::vector<std::string> components;
  while (!name.empty()) {
    const auto slash = std::min(name.find('/'), name.size());
    if (slash > 0 && name.substr(0, slash) != ".") components.emplace_back(name.substr(0, slash));
    name.remove_prefix(std::min(slash + 1, name.size()));
  }
  return components;
}

Result<int> open_by_openat2(int directory_fd, const std::string& name, int flags,
                            const std::string& path) {
  TC_FAULT("openat2", path);
  struct open_how how {};
  how.flags = static_cast<std::uint64_t>(flags);
  how.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS;
  const int fd = uninterrupted([&] {
    return static_cast<int>(::syscall(SYS_openat2, directory_fd, name.c_str(), &how, sizeof(how)));
  });
  if (fd < 0) return system_error(errno, "open", path);
  return fd;
}

// Opens the path component by component, for kernels without openat2. If another process moves a
// directory of the path meanwhile, the file is opened in the moved directory.
Result<int> open_step_by_step(int directory_fd, const std::string& name, int flags,
                              const std::string& path) {
  TC_FAULT("openat", path);
  std::vector<std::string> steps = components_of(name);
  const std::string last = std::move(steps.back());
  steps.pop_back();
  int at = directory_fd;
  const auto close_current = [&] {
    if (at != directory_fd) ::close(at);
  };
  for (const std::string& step : steps) {
    const int next = uninterrupted(
        [&] { return ::openat(at, step.c_str(), O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC); });
    if (next < 0) {
      // The kernel also reports ENOTDIR for a link.
      const int failed = errno;
      struct stat status {};
      const bool link = failed == ENOTDIR &&
                        ::fstatat(at, step.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0 &&
                        S_ISLNK(status.st_mode);
      close_current();
      return system_error(link ? ELOOP : failed, "open", path);
    }
    close_current();
    at = next;
  }
  const int fd = uninterrupted([&] { return ::openat(at, last.c_str(), flags | O_NOFOLLOW); });
  const int failed = errno;
  close_current();
  if (fd < 0) return system_error(failed, "open", path);
  return fd;
}

// Returns true for the errors of kernels and sandboxes that do not support openat2.
bool is_unsupported(int sys_errno) {
  return sys_errno == ENOSYS || sys_errno == EPERM || sys_errno == EINVAL;
}

Result<int> open_descriptor(int directory_fd, const std::string& name, int flags,
                            const std::string& path) {
  auto fd = open_by_openat2(directory_fd, name, flags, path);
  if (!fd && is_unsupported(fd.error().sys_errno)) {
    fd = open_step_by_step(directory_fd, name, flags, path);
  }
  if (fd) return fd;
  if (fd.error().sys_errno == ELOOP) return link_error(path);
  if (fd.error().sys_errno == EXDEV)
    return outside_error(path, "the path leads out of the checkpoint's directory");
  return fd;
}

}  // namespace

Result<File> open_beneath(int directory_fd, const std::string& directory_path,
                          const std::string& name, IoMode mode) {
  const std::string path = directory_path + "/" + name;
  if (!names_file_beneath(name)) {
    return outside_error(
        path, "the name is not a relative path to a file inside the checkpoint's directory");
  }
  TC_FAULT("open", path);
  // O_NONBLOCK: opening a FIFO must not block.
  const int flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK;
  bool direct = mode == IoMode::direct;
  auto fd = open_descriptor(directory_fd, name, direct ? flags | O_DIRECT : flags, path);
  if (!fd && direct && fd.error().sys_errno == EINVAL) {
    direct = false;
    fd = open_descriptor(directory_fd, name, flags, path);
  }
  if (!fd) return fd.error();
  return File::adopt(*fd, path, direct);
}

}  // namespace torch_ckpt::os
