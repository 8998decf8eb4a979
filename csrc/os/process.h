#pragma once

#include <cstdint>
#include <string>

namespace torch_ckpt::os {

/// Identifies a process on this machine. Unlike a PID, it is never reused.
struct ProcessId {
  std::int64_t number = 0;  // PID
  std::uint64_t start = 0;  // start time in clock ticks since boot; 0: unknown

  bool operator==(const ProcessId&) const = default;
};

ProcessId own_process();

/// Identifies the set of processes in which PIDs are unique. `boot` and `pids` are empty if the
/// system does not provide them.
struct ProcessSpace {
  std::string host;
  std::string boot;  // the boot of the machine
  std::string pids;  // the PID namespace: containers on one machine have separate ones
};

ProcessSpace own_process_space();

/// Returns false if the process has ended. A zombie counts as ended.
bool is_alive(const ProcessId& process);

// Owns a descriptor that poll() reports as readable once a process has ended. fd() is -1 on kernels
// before 5.3, in some sandboxes, and if the process has already ended.
class ProcessEnd {
 public:
  explicit ProcessEnd(const ProcessId& process);
  ProcessEnd(ProcessEnd&& other) noexcept;
  ProcessEnd(const ProcessEnd&) = delete;
  ProcessEnd& operator=(const ProcessEnd&) = delete;
  ~ProcessEnd();

  int fd() const { return fd_; }

 private:
  int fd_ = -1;
};

}  // namespace torch_ckpt::os
