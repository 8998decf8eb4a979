#include "os/process.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include "os/uninterrupted.h"

// Older distributions' headers do not define it.
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace torch_ckpt::os {
namespace {

struct Status {
  char state = 'Z';
  std::uint64_t start = 0;
};

// Returns nullopt if the process does not exist or /proc is unavailable.
std::optional<Status> status_of(std::int64_t number) {
  const std::string path = "/proc/" + std::to_string(number) + "/stat";
  const int fd = uninterrupted([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC); });
  if (fd < 0) return std::nullopt;
  char buffer[4096];
  const ssize_t bytes = ::read(fd, buffer, sizeof(buffer));
  ::close(fd);
  if (bytes <= 0) return std::nullopt;
  const std::string text(buffer, static_cast<std::size_t>(bytes));
  // Skip the program name, which may contain any characters. The state is field 3 of the line, and
  // the start time is field 22.
  const std::size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream fields(text.substr(name_end + 1));
  Status status;
  std::string skipped;
  fields >> status.state;
  for (int field = 4; field < 22; ++field) fields >> skipped;
  fields >> status.start;
  return status;
}

}  // namespace

ProcessId own_process() {
  const pid_t number = ::getpid();
  const auto status = status_of(number);
  return {number, status ? status->start : 0};
}

ProcessSpace own_process_space() {
  ProcessSpace space;
  char host[256] = {};
  if (::gethostname(host, sizeof(host) - 1) == 0) space.host = host;
  char pids[64] = {};
  std::ifstream boot("/proc/sys/kernel/random/boot_id");
  if (::readlink("/proc/self/ns/pid", pids, sizeof(pids) - 1) > 0 && boot >> space.boot) {
    space.pids = pids;
  } else {
    space.boot.clear();
  }
  return space;
}

bool is_alive(const ProcessId& process) {
  const auto status = status_of(process.number);
  if (!status) return process.start == 0;
  const bool is_different = process.start != 0 && status->start != process.start;
  return !is_different && status->state != 'Z' && status->state != 'X';
}

ProcessEnd::ProcessEnd(const ProcessId& process)
    : fd_(static_cast<int>(::syscall(SYS_pidfd_open, process.number, 0))) {
  // Check after opening, to be sure that the descriptor refers to the right process.
  if (fd_ >= 0 && !is_alive(process)) {
    ::close(fd_);
    fd_ = -1;
  }
}

ProcessEnd::ProcessEnd(ProcessEnd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

ProcessEnd::~ProcessEnd() {
  if (fd_ >= 0) ::close(fd_);
}

}  // namespace torch_ckpt::os
